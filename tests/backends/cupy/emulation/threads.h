// CUDA's threads on a host: each is a fiber with a stack of its own, and a round robin that skips some at random runs them.
// What a kernel must not rely on (that lanes of a warp keep step, that a copy is there at once) does not hold here either.
#pragma once
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static               // blocks run one after the other, or have their shared memory in `dynamic_shared`
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline int4 make_int4(int a, int b, int c, int d) { return {a, b, c, d}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

// What is done later: Task, at a third of its cost to the compiler.
class Task {
    struct Held { void (*act)(Held*, bool); int owners; };
    template <class F> struct Of : Held {
        F f;
        Of(F f) : Held{act_on, 1}, f(f) {}
        static void act_on(Held* h, bool end) { end ? delete static_cast<Of*>(h) : static_cast<Of*>(h)->f(); }
    };
    Held* held;

public:
    template <class F> Task(F f) : held(new Of<F>(f)) {}
    Task(const Task& other) : held(other.held) { ++held->owners; }
    Task& operator=(Task other) { return std::swap(held, other.held), *this; }
    ~Task() { if (!--held->owners) held->act(held, true); }
    void operator()() const { held->act(held, false); }
};

// ---- fibers ----

struct Index { unsigned x; };
inline Index threadIdx, blockIdx, gridDim, blockDim;

struct Fiber { void* stack_pointer; char* stack; int block, thread; bool done; const int* watched; int seen; bool waited; };
inline std::vector<Fiber> fibers;
inline Fiber* self;
inline void* scheduler_stack_pointer;
inline int first_block;                 // of those that run at once
inline long progress;                   // whatever lets somebody go on counts
inline int launch_before_over;          // it is when nobody goes on who does not wait for it
inline int still_here[8];               // threads of each of these blocks that have not ended
inline Task body = [] {}, between = [] {};
inline void fail(const char* why) {
    fprintf(stderr, "emulation: %s (block %u, thread %u)\n", why, blockIdx.x, threadIdx.x);
    _exit(99);
}
inline unsigned random_number() {
    static unsigned long long state = 88172645463325252ull;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return unsigned(state >> 20);
}

extern "C" void switch_stacks(void** from, void* to);
asm(".text\n.globl switch_stacks\nswitch_stacks:\n push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

inline void yield() { switch_stacks(&self->stack_pointer, scheduler_stack_pointer); }
// Until the word is another one; nobody runs a fiber meanwhile only to look.
inline void wait_while(const int& word, int value) {
    for (self->watched = &word, self->seen = value; word == value;) yield();
    self->watched = nullptr;
}
inline void wait_for_launch_before() { wait_while(launch_before_over, 0), self->waited = true; }
inline void run_fiber() {
    body();
    self->done = true, ++progress, --still_here[self->block - first_block];
    for (;;) yield();
}

// So many blocks at once, each thread from its start to its end.
inline void run_blocks(int first, int count, int threads, Task kernel) {
    constexpr size_t STACK = 256 << 10;
    const size_t needed = size_t(count) * threads;
    for (size_t i = fibers.size(); i < needed; ++i) fibers.push_back({nullptr, (char*)malloc(STACK), 0, 0, false, nullptr, 0, false});
    body = kernel, first_block = first, blockDim.x = threads;
    for (int i = 0; i < count; ++i) still_here[i] = threads;
    for (size_t i = 0; i < needed; ++i) {
        Fiber& f = fibers[i];
        f.block = first + int(i) / threads, f.thread = int(i) % threads, f.done = f.waited = false, f.watched = nullptr;
        void** top = (void**)((uint64_t(f.stack) + STACK - 64) & ~15ull);
        *--top = nullptr, *--top = (void*)run_fiber;
        for (int r = 0; r < 6; ++r) *--top = nullptr;
        f.stack_pointer = top;
    }
    launch_before_over = 0;
    int late = count;                   // a block that falls behind the others of its cluster, or none
    for (int idle = 0, round = 0; idle < 10000; ++idle, ++round) {
        const long before = progress;
        bool left = false, skipped = false;
        if (count > 1 && round % 256 == 0) late = int(random_number() % (count + 1));
        for (size_t i = 0; i < needed; ++i) {
            Fiber& f = fibers[i];
            if (i % 32 == 0) skipped = random_number() % 3 == 0;        // warps, and single lanes
            left |= !f.done;
            if (f.done || skipped || random_number() % 8 == 0 || (f.block - first == late && round % 16)) continue;
            if (f.watched && *f.watched == f.seen) continue;
            self = &f, threadIdx.x = f.thread, blockIdx.x = f.block;
            switch_stacks(&scheduler_stack_pointer, f.stack_pointer);
        }
        if (!left) return;
        between();
        if (idle == 200 && !launch_before_over) launch_before_over = 1, ++progress;
        if (progress != before) idle = 0;
    }
    fail("nobody goes on");
}

// ---- barriers, and what the lanes of a warp tell each other ----

struct Barrier { int arrived = 0, generation = 0; };
inline Barrier named_barriers[8][16], warp_barriers[8][32];
inline int local_block() { return self->block - first_block; }
inline void arrive(Barrier& b, int count) {
    ++progress;
    if (++b.arrived == count) b.arrived = 0, ++b.generation;
}
inline void arrive_and_wait(Barrier& b, int count) {
    const int generation = b.generation;
    arrive(b, count);
    wait_while(b.generation, generation);
    ++progress;
}
inline void wait_for_warp() { arrive_and_wait(warp_barriers[local_block()][self->thread / 32], 32); }
inline void __syncthreads() { arrive_and_wait(named_barriers[local_block()][0], blockDim.x); }
inline void __syncwarp(unsigned lanes = ~0u) {
    if (lanes == ~0u) wait_for_warp();
    else if (__builtin_popcount(lanes) != 1) fail("some lanes of a warp wait for each other");
}
inline void __threadfence() {}

struct Slots { unsigned long long of[32][8]; };
inline Slots& slots() {
    static Slots all[8][32];
    return all[local_block()][self->thread / 32];
}
template <class T> T __shfl_sync(unsigned, T v, int lane) {
    memcpy(slots().of[threadIdx.x & 31], &v, sizeof v);
    wait_for_warp();
    memcpy(&v, slots().of[lane & 31], sizeof v);
    wait_for_warp();
    return v;
}
template <class T> T __shfl_up_sync(unsigned, T v, int by) {
    const int lane = threadIdx.x & 31;
    return __shfl_sync(~0u, v, lane >= by ? lane - by : lane);
}
template <class T> T __shfl_xor_sync(unsigned, T v, int by) { return __shfl_sync(~0u, v, (threadIdx.x & 31) ^ by); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __ballot_sync(unsigned, bool mine) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= unsigned(__shfl_sync(~0u, int(mine), lane)) << lane;
    return found;
}

inline bool __any_sync(unsigned lanes, bool mine) { return __ballot_sync(lanes, mine) != 0; }

// ---- cp.async: a thread's copies come when it waits for their group ----

typedef std::vector<Task> Copies;
struct Groups { Copies open; std::vector<Copies> closed; };
inline Groups groups_of[8][1024];
inline Groups& groups() { return groups_of[local_block()][self->thread]; }
inline void copy_later(char* to, const char* from, int width, int bytes) {
    if (((uint64_t)from | (uint64_t)to) & (width - 1)) fail("a copy that is not aligned");
    groups().open.push_back([=] { memcpy(to, from, bytes), memset(to + bytes, 0, width - bytes); });
}
inline void close_group() { groups().closed.emplace_back().swap(groups().open); }
inline void wait_for_groups(size_t pending) {
    for (auto& closed = groups().closed; closed.size() > pending; closed.erase(closed.begin()))
        for (const auto& copy : closed.front()) copy();
}
inline bool all_copies_waited_for() {
    for (auto& of_block : groups_of)
        for (auto& of_thread : of_block)
            for (const auto& some : of_thread.closed)
                if (!some.empty()) return false;
    return true;
}
alignas(128) inline char generic_shared[232448];

// ---- functions ----

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T __ldg(const T* p) { return *p; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return unsigned((((unsigned long long)high << 32) | low) >> (by & 31)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= unsigned(both >> (8 * (which >> (4 * i) & 7)) & 255) << (8 * i);
    return found;
}
inline float __double2float_rz(double x) {
    const float y = float(x);
    return std::fabs(double(y)) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}
inline int atomicAdd(int* p, int v) {
    const int old = *p;
    *p += v;
    for (unsigned rounds = random_number() % 1024; rounds > 0; --rounds, ++progress) yield();   // some answers take long
    return old;
}
inline unsigned f16_of(float x) { const _Float16 y = _Float16(x); unsigned short bits; memcpy(&bits, &y, 2); return bits; }
inline float of_f16(unsigned short bits) { _Float16 y; memcpy(&y, &bits, 2); return float(y); }
inline unsigned bf16_of(float x) { const unsigned bits = __float_as_uint(x); return x != x ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16; }
