"""Start of a block: which rows the later stages look at, and zeros where they count."""

import triton
import triton.language as tl

TILE = 256


@triton.jit(do_not_specialize=["num_rows"])
def _open_rows_kernel(
    tau_ptr,  # [rows] f32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    bound_state_ptr,  # [rows] i32 with BOUND, else unused
    state_ptr,  # [rows] i32
    end_ptr,  # [rows] i32
    raised_ptr,  # [rows] f32
    survivors_ptr,  # [rows] i32
    emitted_ptr,  # [rows] i32
    zero_ptr,  # [rows] i32
    num_rows,
    BOUND: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    tau = tl.load(tau_ptr + row, mask=inside, other=0.0)
    ks = tl.load(ks_ptr + row, mask=inside, other=0)
    ke = tl.load(ke_ptr + row, mask=inside, other=0)
    nothing = tl.zeros_like(ks)
    state = nothing
    if BOUND:
        state = tl.load(bound_state_ptr + row, mask=inside, other=0)
    tl.store(state_ptr + row, state, mask=inside)
    tl.store(end_ptr + row, tl.where((tau != tau) | (state != 0), ks, ke), mask=inside)
    tl.store(raised_ptr + row, tau, mask=inside)
    tl.store(survivors_ptr + row, nothing, mask=inside)
    tl.store(emitted_ptr + row, nothing, mask=inside)
    tl.store(zero_ptr + row, nothing, mask=inside)


def launch_open_rows(tau, ks, ke, bound_state, state, end, raised, survivors, emitted, zero) -> None:
    """Close the windows of rows that cannot be served, and set counters to 0.

    Args:
        tau: ``[rows]`` float32.
        ks, ke: ``[rows]`` int32, the rows' windows.
        bound_state: ``[rows]`` int32 from ``launch_row_bound``, or None without a bound.
        state: ``[rows]`` int32, written: ``bound_state``, or 0.
        end: ``[rows]`` int32, written: ``ke``, or ``ks`` for a row with a state or whose ``tau`` is NaN.
        raised: ``[rows]`` float32, written: ``tau``.
        survivors, emitted, zero: ``[rows]`` int32, written: 0.

    Exactness: exact.
    """
    rows = tau.shape[0]
    _open_rows_kernel[(triton.cdiv(rows, TILE),)](
        tau, ks, ke, ks if bound_state is None else bound_state, state, end, raised, survivors, emitted, zero, rows,
        BOUND=bound_state is not None, TILE=TILE, num_warps=4,
    )  # fmt: skip
