// ptx.cuh for a host: barriers in shared memory, the copy engine and wgmma of float8, as hopper_fp8.cu uses them. Copies come
// some time later, and products read shared memory when they are waited for: so a stage that is given back too soon is seen.
#pragma once
#include "common.cuh"
#ifndef TF32
#define TF32 0
#endif
#ifndef INT8
#define INT8 0
#endif
#ifndef DOUBLE
#define DOUBLE 0
#endif
#define WORD_RESULTS (TF32 || INT8)
#if INT8
typedef int Sum;
#else
typedef float Sum;
#endif

// Shared memory of the blocks of a cluster. Addresses begin at BASE, which is aligned to 16 bytes and no more.
constexpr u32 BASE = 48, SIZE = 232448;
inline char* shared_memory[8];
__attribute__((always_inline)) inline char* at(u32 address, int rank) {
    if (address < BASE || address >= BASE + SIZE) fail("an address outside of shared memory");
    return shared_memory[rank] + (address - BASE);
}
__attribute__((always_inline)) inline char* at(u32 address) { return at(address, local_block()); }
// A GPU ends a launch that touches the shared memory of a block that has ended.
inline void must_be_here(int rank) {
    if (still_here[rank] == 0) fail("an arrival at a block that has ended");
}
inline std::vector<Task> on_their_way;
inline void some_arrive() {
    for (size_t i = 0; i < on_their_way.size();) {
        if (random_number() % 4) { ++i; continue; }
        const auto copy = on_their_way[i];
        on_their_way.erase(on_their_way.begin() + i);
        copy(), ++progress;
    }
}

inline void keep_in_register(u32&) {}
inline void keep_in_register(int&) {}
inline void keep_in_register(i64&) {}

// ---- mbarrier ----

struct Counter { int expected, pending, phase; long bytes; bool made; };
inline Counter counters[8][SIZE / 8 + 16];
inline Counter& counter(u32 address, int rank) {
    if (address & 7) fail("a barrier that is not aligned");
    return counters[rank][address / 8];
}
inline void settle_phase(Counter& c) {
    if (!c.made || c.pending < 0) fail("an arrival that nobody expects");
    if (c.pending == 0 && c.bytes == 0) c.phase ^= 1, c.pending = c.expected, ++progress;
}
inline void barrier_init(u32 b, u32 arrivals) { counter(b, local_block()) = {int(arrivals), int(arrivals), 0, 0, true}; }
inline void barrier_arrive(u32 b, u32 rank) { must_be_here(rank), --counter(b, rank).pending, settle_phase(counter(b, rank)); }
inline void barrier_arrive_here(u32 b) { barrier_arrive(b, local_block()); }
inline void barrier_expect(u32 b, u32 bytes) { counter(b, local_block()).bytes += bytes, barrier_arrive_here(b); }
inline void complete(u32 b, int rank, long bytes) { must_be_here(rank), counter(b, rank).bytes -= bytes, settle_phase(counter(b, rank)); }
inline void barrier_wait(u32 b, u32 parity) {
    Counter& c = counter(b, local_block());
    if (!c.made) fail("a wait for no barrier");
    wait_while(c.phase, int(parity & 1));
}
inline bool barrier_test(u32 b, u32 parity) {
    Counter& c = counter(b, local_block());
    if (!c.made) fail("a test of no barrier");
    return c.phase != int(parity & 1);
}
inline void barrier_init_fence() {}
// This thread's copies are under way; it arrives when all of them are there, which takes long for some.
inline void arrive_later(u32 barrier, int rank, const Copies& copies, int late) {
    on_their_way.push_back([=] {
        if (late > 0) return arrive_later(barrier, rank, copies, late - 1);
        for (const auto& copy : copies) copy();
        barrier_arrive(barrier, rank);
    });
}
inline void arrive_when_copied(u32 barrier) {
    const Copies copies = std::move(groups().open);
    groups().open.clear();
    arrive_later(barrier, local_block(), copies, random_number() % 32 ? 0 : 40);
}

// ---- clusters ----

inline u32 cluster_rank() { return local_block(); }
inline Barrier cluster_barrier;
inline int cluster_threads;
inline void cluster_arrive() {}
inline void cluster_wait() { arrive_and_wait(cluster_barrier, cluster_threads); }
inline void cluster_sync() { cluster_wait(); }
inline void store_remote(u32 to, u32 barrier, u32 rank, int4 v) { memcpy(at(to, rank), &v, 16), complete(barrier, rank, 16); }
inline bool elected() {
    wait_for_warp();
    return (threadIdx.x & 31) == 0;
}
inline void named_sync(int which, int count) { arrive_and_wait(named_barriers[local_block()][which], count); }
inline void named_arrive(int which, int count) { arrive(named_barriers[local_block()][which], count); }
inline void warpgroup_sync(int which) { named_sync(which + 1, 128); }

// ---- TMA: a map is its address, rank | size << 8 | swizzle << 16, five extents, four strides, five sides of a box ----

struct alignas(64) TensorMap { u64 opaque[16]; };
inline void prefetch_map(const TensorMap*) {}
inline void refresh_map(const TensorMap*) {}
constexpr u64 EVICT_FIRST = 1, EVICT_NORMAL = 2, EVICT_LAST = 3;
// Lines of 128 bytes (`mode` 3) or of 64 (2), as CU_TENSOR_MAP_SWIZZLE_* number them.
__attribute__((always_inline)) inline u32 swizzled(u32 address, int mode = 3) { return address ^ (((address >> 7) & (mode == 3 ? 7 : mode == 2 ? 3 : 0)) << 4); }

#pragma GCC push_options
#pragma GCC optimize("O2")              // copies and products take most of a run, the rest of a kernel most of its compilation
inline long move_box(const TensorMap* map, const int (&first)[5], u32 shared, int rank, bool store) {
    const u64* const o = map->opaque;
    const int dims = o[1] & 255, size = o[1] >> 8 & 255;
    const int mode = int(o[1] >> 16);
    if (!o[0] || (i64(first[0]) * size & 15)) fail("a blank map, or a first coordinate that is no multiple of 16 bytes");
    long bytes = 0;
    for (int i[5] = {};;) {
        bool inside = true;
        u64 address = o[0];
        for (int d = 0; d < dims; ++d) {
            const i64 x = i64(first[d]) + i[d];
            inside &= x >= 0 && x < i64(o[2 + d]);
            address += u64(x) * (d ? o[6 + d] : u64(size));
        }
        char* const here = at(swizzled(shared + bytes, mode), rank);
        if (store && inside) memcpy((void*)address, here, size);
        if (!store && inside) memcpy(here, (void*)address, size);
        if (!store && !inside) memset(here, 0, size);
        bytes += size;
        int d = 0;
        while (d < dims && ++i[d] == int(o[11 + d])) i[d++] = 0;
        if (d == dims) return bytes;
    }
}
#pragma GCC pop_options
// Maps of what the launch before copies, from one to another; loads through all others, and those before that launch is over.
inline const TensorMap* copied_maps[2][2];
inline bool one_side_is_copied;
inline long other_loads, early_loads;
inline void note_load(const TensorMap* map) {
    for (const auto& some : copied_maps)
        for (const TensorMap* copied = some[0]; copied < some[1]; ++copied) {
            if (memcmp(map, copied, sizeof *map)) continue;     // a kernel's arguments are copies of their own
            if (!self->waited) fail("a load of copies that did not wait for them");
            return;
        }
    ++other_loads, early_loads += !launch_before_over;
}
inline void load_later(u32 to, const TensorMap* map, u32 barrier, int rank, int x, int y, int z, int w = 0) {
    note_load(map);
    on_their_way.push_back([=] { complete(barrier, rank, move_box(map, {x, y, z, w, 0}, to, rank, false)); });
}
inline void load_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, u64) { load_later(to, map, barrier, local_block(), x, y, z); }
inline void multicast_box(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int x, int y, int z, u64) {
    for (int rank = 0; rank < 8; ++rank)
        if (blocks >> rank & 1) load_later(to, map, barrier, rank, x, y, z);
}
inline void load_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, int w, u64) { load_later(to, map, barrier, local_block(), x, y, z, w); }
inline void multicast_box(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int x, int y, int z, int w, u64) {
    for (int rank = 0; rank < 8; ++rank)
        if (blocks >> rank & 1) load_later(to, map, barrier, rank, x, y, z, w);
}
inline void send_box(bool wanted, u32 from, const TensorMap* map, int x, int y, int z, int w, int v) {
    if (wanted) move_box(map, {x, y, z, w, v}, from, local_block(), true);
}
inline void wait_until_read() {}
inline void wait_until_written() {}
inline void show_to_copy_engine() {}

// ---- wgmma ----

inline void wgmma_fence() {}
// Of each thread: products that are to be committed, and the numbers of products of groups that are.
struct Products { std::vector<Task> of; std::vector<size_t> groups; };
inline Products& products_here() {
    static Products all[8][1024];
    return all[local_block()][self->thread];
}
inline std::vector<Task>& products() { return products_here().of; }
inline void wgmma_commit() {
    Products& p = products_here();
    size_t before = 0;
    for (size_t count : p.groups) before += count;
    p.groups.push_back(p.of.size() - before);
}
// Groups that need not be waited for are over, or are not.
template <int PENDING> void wgmma_wait() {
    for (int i = 0; i < 3; ++i) yield();
    Products& p = products_here();
    const size_t left = PENDING == 0 ? 0 : random_number() % (PENDING + 1);
    while (p.groups.size() > left) {
        for (size_t i = 0; i < p.groups[0]; ++i) p.of[i]();
        p.of.erase(p.of.begin(), p.of.begin() + p.groups[0]), p.groups.erase(p.groups.begin());
    }
    if (PENDING == 0 && !p.of.empty()) fail("products that nobody committed");
    wait_for_warp();                    // .sync.aligned: a lane that goes on knows that all of its warp have read
}
inline u64 smem_descriptor(u32 address, u32 leading, u32 stride) {
    if (stride != 1024) fail("lines of another width");
    return 1ull << 62 | u64(stride >> 4) << 32 | u64(leading >> 4) << 16 | (address & 0x3FFFF) >> 4;
}
inline float numbers_of_codes[2][256];          // e4m3, e5m2
inline u32 start_of(u64 descriptor) { return u32(descriptor & 0x3FFF) << 4; }
// From an address on to the end of its line of 128 bytes, whose pieces of 16 are swizzled.
struct Line {
    char* memory;
    u32 first, turn;
    __attribute__((always_inline)) Line(u32 address) : memory(::at(address & ~127u)), first(address & 127), turn((address >> 7 & 7) << 4) { ::at(address | 127u); }
    __attribute__((always_inline)) char* at(u32 byte) const { return memory + ((first + byte) ^ turn); }
};

#ifdef W_E5M2
#pragma GCC push_options
#pragma GCC optimize("O2")
inline void multiply_fp8(int n, float* d, u64 w, u64 x, bool fresh, bool traded) {
    const float* const first = numbers_of_codes[traded ? X_E5M2 : W_E5M2];
    const float* const second = numbers_of_codes[traded ? W_E5M2 : X_E5M2];
    const int lane = threadIdx.x & 31, own = ((threadIdx.x & 127) >> 5) * 16 + lane / 4;
    double columns[2][32];
    for (int upper = 0; upper < 2; ++upper) {
        const Line line(start_of(w) + (own + upper * 8) * 128);
        for (int k = 0; k < 32; ++k) columns[upper][k] = first[*(u8*)line.at(k)];
    }
    for (int i = 0; i < n / 2; i += i & 1 ? 3 : 1) {        // i and i + 2: both columns of a row
        const Line line(start_of(x) + (i / 4 * 8 + (lane & 3) * 2 + (i & 1)) * 128);
        double low = fresh ? 0.0 : d[i], high = fresh ? 0.0 : d[i + 2];
        for (int k = 0; k < 32; ++k) {
            const double number = second[*(u8*)line.at(k)];
            low += columns[0][k] * number, high += columns[1][k] * number;
        }
        d[i] = float(low), d[i + 2] = float(high);
    }
}
#pragma GCC pop_options
inline void multiply_fp8_later(int n, float* d, u64 w, u64 x, bool fresh, bool traded) {
    products().push_back([=] { multiply_fp8(n, d, w, x, fresh, traded); });
}
template <int N> struct MmaFp8 {
    static void start(float (&d)[N / 2], u64 w, u64 x) { multiply_fp8_later(N, d, w, x, true, false); }
    static void add(float (&d)[N / 2], u64 w, u64 x) { multiply_fp8_later(N, d, w, x, false, false); }
    static void start_traded(float (&d)[N / 2], u64 x, u64 w) { multiply_fp8_later(N, d, x, w, true, true); }
    static void add_traded(float (&d)[N / 2], u64 x, u64 w) { multiply_fp8_later(N, d, x, w, false, true); }
};
#endif

#ifdef W_CODE
__attribute__((always_inline)) inline float of_16_bits(u32 v) {
    const u32 bits = (v & 0xFFFF) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return BFLOAT ? f : of_f16(u16(v));
}
inline u32 to_16_bits(float v) { return (BFLOAT ? bf16_of(v) : f16_of(v)) & 0xFFFF; }
template <class F> u32 of_pairs(u32 a, u32 b, F f) {
    return to_16_bits(f(of_16_bits(a), of_16_bits(b))) | to_16_bits(f(of_16_bits(a >> 16), of_16_bits(b >> 16))) << 16;
}

template <class F> u32 of_pairs(u32 a, u32 b, u32 c, F f) {
    const auto one = [&](int by) { return to_16_bits(f(of_16_bits(a >> by), of_16_bits(b >> by), of_16_bits(c >> by))); };
    return one(0) | one(16) << 16;
}

// Of the four lanes of a quarter of a warp: both their columns, for the lower and upper eight of k.
struct Quarter { u32 of[2][4][2]; };
#pragma GCC push_options
#pragma GCC optimize("O2")
inline void multiply_weights(int n, float* d, const Quarter& own, u64 x, int keep) {
    const int lane = threadIdx.x & 31;
    double columns[2][16];
    for (int upper = 0; upper < 2; ++upper)
        for (int k = 0; k < 16; ++k) columns[upper][k] = of_16_bits(own.of[upper][k % 8 / 2][k / 8] >> (k & 1) * 16);
    for (int i = 0; i < n / 2; i += i & 1 ? 3 : 1) {        // i and i + 2: both columns of a row
        const Line line(start_of(x) + (i / 4 * 8 + (lane & 3) * 2 + (i & 1)) * 128);
        double low = keep ? d[i] : 0.0, high = keep ? d[i + 2] : 0.0;
        for (int k = 0; k < 16; ++k) {
            const double number = of_16_bits(*(u16*)line.at(k * 2));
            low += columns[0][k] * number, high += columns[1][k] * number;
        }
        d[i] = float(low), d[i + 2] = float(high);
    }
}
#pragma GCC pop_options
inline void multiply_weights_later(int n, float* d, const u32 (&w)[4], u64 x, int keep) {
    Slots& s = slots();
    const int lane = threadIdx.x & 31;
    for (int i = 0; i < 4; ++i) s.of[lane][i] = w[i];
    wait_for_warp();
    Quarter own;
    for (int c = 0; c < 4; ++c)
        for (int i = 0; i < 4; ++i) own.of[i & 1][c][i >> 1] = u32(s.of[(lane & ~3) + c][i]);
    wait_for_warp();
#ifdef LOW
    const uint4 issued = {w[0], w[1], w[2], w[3]};
    const u32* const registers = w;
    products().push_back([=] {
        if (memcmp(&issued, registers, 16)) fail("registers of products under way were written");
        multiply_weights(n, d, own, x, keep);
    });
#else
    products().push_back([=] { multiply_weights(n, d, own, x, keep); });
#endif
}
template <int N> struct MmaWeights {
    template <int COUNT> static void run(float (&d)[COUNT], const u32 (&w)[4], u64 x, int keep) { multiply_weights_later(N, d, w, x, keep); }
};
#endif

// ---- the rest ----

template <int N> void registers_down() {}
template <int N> void registers_up() {}
inline void store_matrices(u32 row, const u32 (&v)[4], bool transposed) {
    Slots& s = slots();
    const int lane = threadIdx.x & 31;
    s.of[lane][0] = row;
    wait_for_warp();
    for (int b = 0; b < 4; ++b)
        for (int e = 0; e < 2; ++e) {
            const int line = lane / 4, place = (lane & 3) * 2 + e;
            const u16 value = u16(v[b] >> (16 * e));
            memcpy(at(u32(s.of[b * 8 + (transposed ? place : line)][0]) + (transposed ? line : place) * 2), &value, 2);
        }
    wait_for_warp();
}
// The other way round, transposed.
inline void load_matrices(u32 (&v)[4], u32 row) {
    Slots& s = slots();
    const int lane = threadIdx.x & 31;
    s.of[lane][0] = row;
    wait_for_warp();
    for (int b = 0; b < 4; ++b) {
        v[b] = 0;
        for (int e = 0; e < 2; ++e) {
            u16 value;
            memcpy(&value, at(u32(s.of[b * 8 + (lane & 3) * 2 + e][0]) + lane / 4 * 2), 2);
            v[b] |= u32(value) << 16 * e;
        }
    }
    wait_for_warp();
}
inline void store_transposed(u32 row, u32 a, u32 b, u32 c, u32 d) { store_matrices(row, {a, b, c, d}, true); }
inline void store_blocks(u32 row, u32 a, u32 b, u32 c, u32 d) { store_matrices(row, {a, b, c, d}, false); }
template <class T> T load_shared_as(u32 address) {
    if (address % sizeof(T)) fail("a load that is not aligned");
    T v;
    memcpy(&v, at(address), sizeof v);
    return v;
}
inline uint4 load_shared16(u32 address) { return load_shared_as<uint4>(address); }
inline u32 load_shared_word(u32 address) { return load_shared_as<u32>(address); }
inline u32 load_shared_half(u32 address) { return load_shared_as<u16>(address); }
inline u32 load_shared_byte(u32 address) { return load_shared_as<u8>(address); }
inline float load_shared(u32 address) { return load_shared_as<float>(address); }
template <class T> void load_shared(T& v, u32 address) { v = load_shared_as<T>(address); }
template <class T> void store_shared(u32 address, T v) {
    if (address % sizeof v) fail("a store that is not aligned");
    memcpy(at(address), &v, sizeof v);
}
inline void store_shared16(u32 address, uint4 v) { store_shared(address, v); }
