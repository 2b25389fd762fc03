# mypy: ignore-errors
"""The tile kernel, as LLVM IR: float32 products of small groups without packing.

BLAS copies its operands into blocks before it multiplies, which small products cannot pay back.
Here a tile of `rows` x `vectors` accumulators stays in registers over all of K:

    for each product that this thread claims (an atomic counter; the largest come first):
        for each strip of columns, `vectors` registers wide:
            for each block of rows, at most `rows` high, all blocks nearly equal:
                for k: acc[r][v] += splat(A[r, k]) * B[k, v]        (fused multiply-add)
                C[block, strip] = acc

A is read one element at a time, so its strides are free; columns of B and C must be contiguous. The
last strip is masked in its loads and stores: nothing outside B is read, nothing outside C written.
Each element is summed over k in order, whatever the tile, the threads and the neighbours.
"""

from __future__ import annotations

import llvmlite.ir as ir

I1, I32, I64, F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTES, LONGS, FLOATS = ir.IntType(8).as_pointer(), I64.as_pointer(), F32.as_pointer()
ALIGN = 4

WORK_COLUMNS = ("m", "n", "k", "a", "b", "c", "a_row", "a_col", "b_row", "c_row")
"""Arrays of int64 that `work` reads, after the address of the counter and the number of products."""


def long(value):
    return ir.Constant(I64, value)


class TileKernel:
    """Builds one module for tiles of `rows` x `vectors` registers of `lanes` floats."""

    def __init__(self, rows: int, vectors: int, lanes: int, triple: str) -> None:
        self.rows, self.vectors, self.lanes = rows, vectors, lanes
        self.vector = ir.VectorType(F32, lanes)
        self.module = ir.Module("tiles")
        self.module.triple = triple
        self._declare()
        blocks = range(1, rows + 1)
        self.full, self.masked = ([self._block(r, masked) for r in blocks] for masked in (False, True))
        self._work()

    def _declare(self) -> None:
        name, vector, mask = f"v{self.lanes}f32", self.vector, ir.VectorType(I1, self.lanes)
        declared = {
            "fma": (f"llvm.fma.{name}", vector, [vector] * 3),
            "load": (f"llvm.masked.load.{name}.p0", vector, [vector.as_pointer(), I32, mask, vector]),
            "store": (f"llvm.masked.store.{name}.p0", ir.VoidType(), [vector, vector.as_pointer(), I32, mask]),
            "prefetch": ("llvm.prefetch.p0", ir.VoidType(), [BYTES, I32, I32, I32]),
        }
        self.calls = {
            key: ir.Function(self.module, ir.FunctionType(result, arguments), symbol)
            for key, (symbol, result, arguments) in declared.items()
        }

    def _splat(self, build, value, kind):
        vector = ir.VectorType(kind, self.lanes)
        one = build.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return build.shuffle_vector(one, one, zeros)

    def _masks(self, build, columns):
        """Lane l of vector v counts if v*lanes + l < columns."""
        lanes = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        left = [build.sub(columns, long(v * self.lanes)) for v in range(self.vectors)]
        return [build.icmp_signed("<", lanes, self._splat(build, x, I64)) for x in left]

    def _block(self, rows: int, masked: bool):
        """C[rows, strip] = A[rows, :] @ B[:, strip], with all accumulators in registers."""
        kind = ir.FunctionType(ir.VoidType(), [FLOATS] * 3 + [I64] * 6)
        block = ir.Function(self.module, kind, f"{'masked' if masked else 'full'}_{rows}")
        block.linkage = "internal"
        block.attributes.add("noinline")
        a, b, c, depth, a_row, a_col, b_row, c_row, columns = block.args
        entry, loop, end = (block.append_basic_block(name) for name in ("entry", "loop", "end"))
        build = ir.IRBuilder(entry)
        strip = range(self.vectors)
        zero = ir.Constant(self.vector, [0.0] * self.lanes)
        align = ir.Constant(I32, ALIGN)
        masks = self._masks(build, columns) if masked else []
        a_rows = [build.gep(a, [build.mul(a_row, long(r))]) for r in range(rows)]
        build.branch(loop)

        build.position_at_end(loop)
        k = build.phi(I64)
        acc = [[build.phi(self.vector) for _ in strip] for _ in range(rows)]
        b_at = build.gep(b, [build.mul(k, b_row)])
        places = [build.bitcast(build.gep(b_at, [long(v * self.lanes)]), self.vector.as_pointer()) for v in strip]
        if masked:
            right = [build.call(self.calls["load"], [places[v], align, masks[v], zero]) for v in strip]
        else:
            right = [build.load(place, align=ALIGN) for place in places]
            for v in strip:  # the next strip of the same row: a prefetch beyond the matrix is harmless
                ahead = build.bitcast(build.gep(b_at, [long((self.vectors + v) * self.lanes)]), BYTES)
                build.call(self.calls["prefetch"], [ahead, *(ir.Constant(I32, x) for x in (0, 2, 1))])
        a_at = build.mul(k, a_col)
        left = [self._splat(build, build.load(build.gep(row, [a_at])), F32) for row in a_rows]
        sums = [[build.call(self.calls["fma"], [left[r], right[v], acc[r][v]]) for v in strip] for r in range(rows)]
        following = build.add(k, long(1))
        k.add_incoming(long(0), entry)
        k.add_incoming(following, loop)
        for r in range(rows):
            for v in strip:
                acc[r][v].add_incoming(zero, entry)
                acc[r][v].add_incoming(sums[r][v], loop)
        build.cbranch(build.icmp_signed("<", following, depth), loop, end)

        build.position_at_end(end)
        for r in range(rows):
            row = build.gep(c, [build.mul(c_row, long(r))])
            for v in strip:
                place = build.bitcast(build.gep(row, [long(v * self.lanes)]), self.vector.as_pointer())
                if masked:
                    build.call(self.calls["store"], [sums[r][v], place, align, masks[v]])
                else:
                    build.store(sums[r][v], place, align=ALIGN)
        build.ret_void()
        return block

    def _table(self, name: str, functions):
        kind = ir.ArrayType(functions[0].ftype.as_pointer(), len(functions))
        table = ir.GlobalVariable(self.module, kind, name)
        table.initializer, table.global_constant, table.linkage = ir.Constant(kind, functions), True, "internal"
        return table

    def _work(self) -> None:
        """What each thread runs: claims products until none is left. m, n and k are at least 1."""
        tables = self._table("full", self.full), self._table("partial", self.masked)
        work = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [LONGS]), "work")
        names = ("entry", "claim", "product", "columns", "rows", "next", "done")
        entry, claim, product, columns, rows, following, done = (work.append_basic_block(name) for name in names)
        build = ir.IRBuilder(entry)
        given = [build.load(build.gep(work.args[0], [long(i)])) for i in range(2 + len(WORK_COLUMNS))]
        counter, count = build.inttoptr(given[0], LONGS), given[1]
        arrays = [build.inttoptr(address, LONGS) for address in given[2:]]
        build.branch(claim)

        build.position_at_end(claim)
        mine = build.atomic_rmw("add", counter, long(1), "monotonic")
        build.cbranch(build.icmp_signed("<", mine, count), product, done)

        build.position_at_end(product)
        values = [build.load(build.gep(array, [mine])) for array in arrays]
        m, n, k, a, b, c, a_row, a_col, b_row, c_row = values
        a, b, c = (build.inttoptr(address, FLOATS) for address in (a, b, c))
        blocks = build.sdiv(build.add(m, long(self.rows - 1)), long(self.rows))
        height, taller = build.sdiv(m, blocks), build.srem(m, blocks)
        build.branch(columns)

        build.position_at_end(columns)
        j = build.phi(I64)
        left = build.sub(n, j)
        whole = build.icmp_signed(">=", left, long(self.vectors * self.lanes))
        build.branch(rows)

        build.position_at_end(rows)
        index, i = build.phi(I64), build.phi(I64)
        here = build.add(height, build.zext(build.icmp_signed("<", index, taller), I64))
        chosen = [build.load(build.gep(t, [long(0), build.sub(here, long(1))])) for t in tables]
        block = build.select(whole, *chosen)
        a_at, b_at = build.gep(a, [build.mul(i, a_row)]), build.gep(b, [j])
        c_at = build.gep(c, [build.add(build.mul(i, c_row), j)])
        build.call(block, [a_at, b_at, c_at, k, a_row, a_col, b_row, c_row, left])
        index_next, i_next = build.add(index, long(1)), build.add(i, here)
        build.cbranch(build.icmp_signed("<", index_next, blocks), rows, following)

        build.position_at_end(following)
        j_next = build.add(j, long(self.vectors * self.lanes))
        build.cbranch(build.icmp_signed("<", j_next, n), columns, claim)
        for phi, start, block_from, value in ((index, columns, rows, index_next), (i, columns, rows, i_next)):
            phi.add_incoming(long(0), start)
            phi.add_incoming(value, block_from)
        j.add_incoming(long(0), product)
        j.add_incoming(j_next, following)

        build.position_at_end(done)
        build.ret_void()


def source(rows: int, vectors: int, lanes: int, triple: str) -> str:
    """The module's text."""
    return str(TileKernel(rows, vectors, lanes, triple).module)
