"""Write layer cases and the reference's outputs into one file that `run_cases.cpp` reads.

    python tests/native/write_cases.py FILE

A case is a line of 20 int64 (see `run_cases.cpp`), two float32, and the arrays; sizes follow from the line.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import ADVERSARIAL, Case, build
from int8moe.backends.cpu import layout
from int8moe.backends.cpu.run import _ACTIVATIONS, _DTYPES
from int8moe.config import MoEActivation

MORE = {
    f"random_{n}": dict(seed=n, E=5, topk=3, H=40 + 37 * n, I=24 + 29 * n, M=1 + 11 * n, bias=n % 2 == 0)
    for n in range(8)
} | {  # more rows than a block takes, in more columns than fit beside them
    "many_rows_wide": dict(seed=8, E=2, topk=2, H=1100, I=72, M=150),
    "many_rows_deep": dict(seed=9, E=2, topk=1, H=72, I=1100, M=190),
    # blocks of 49 and 48 rows, which need four tiles of 13 rows each
    "uneven_blocks": dict(seed=10, E=1, topk=1, H=72, I=40, M=97),
    # more output of GEMM 2 than caches keep (kNonTemporalBytes)
    "much_output": dict(seed=11, E=4, topk=4, H=1024, I=24, M=520, dtype="bfloat16"),
}


def raw(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write(file, name: str, case: Case) -> None:
    c, q = case.config, case.quant_config
    activation = MoEActivation(c.activation)
    order = layout.w13_order(c.is_act_and_mul, activation.is_interleaved)
    line = [
        _DTYPES[case.hidden_states.dtype], _ACTIVATIONS[activation], c.is_act_and_mul, activation.is_interleaved,
        c.swiglu_limit is not None, case.apply_router_weight_on_input, case.hidden_states.shape[0], c.experts_per_token,
        c.num_experts, case.w13.shape[0], c.hidden_dim, c.intermediate_size_per_partition,
        case.topk_ids.dtype is torch.int64, case.expert_map is not None, q.w1_bias is not None, order, len(name),
        0, 0, 0,
    ]  # fmt: skip
    file.write(struct.pack("<20q2f", *map(int, line), c.swiglu_alpha, c.swiglu_limit or 0.0) + name.encode())
    for tensor in (
        case.hidden_states, case.topk_weights, case.topk_ids, case.expert_map, case.w13, case.w2, q.w1_scale,
        q.w2_scale, q.w1_bias, q.w2_bias, case.reference_output(),
    ):  # fmt: skip
        file.write(raw(tensor))


def main() -> None:
    with open(sys.argv[1], "wb") as file:
        for name, arguments in {**ADVERSARIAL, **MORE}.items():
            write(file, name, build(**arguments))
    print(f"{len(ADVERSARIAL) + len(MORE)} cases in {sys.argv[1]}")


if __name__ == "__main__":
    main()
