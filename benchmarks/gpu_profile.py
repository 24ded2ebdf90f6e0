"""What limits the kernels of a layer: one call each for NVIDIA's profiler to measure, and its numbers in one table.

    PYTHONPATH=src ncu --set full --clock-control none --profile-from-start off --csv --page raw --log-file raw.csv \
        python3 benchmarks/gpu_profile.py run qwen3-30b:512,2048 mixtral:8192
    PYTHONPATH=src python3 benchmarks/gpu_profile.py read raw.csv --out record.json

The profiler runs a kernel many times, one at a time and from a cold cache: times are longer than within a layer, where
kernels overlap.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

MICROSECONDS = {
    "second": 1e6,
    "s": 1e6,
    "msecond": 1e3,
    "ms": 1e3,
    "usecond": 1.0,
    "us": 1.0,
    "nsecond": 1e-3,
    "ns": 1e-3,
}
BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
RATES = {f"{name}/{second}": size for name, size in BYTES.items() for second in ("second", "s")}
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "dram_bytes_per_second": "dram__bytes.sum.per_second",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_to_sm_bytes_per_second": "l1tex__m_xbar2l1tex_read_bytes.sum.per_second",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_pipe_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warp_instructions": "inst_executed",
    "instructions_per_cycle": "sm__inst_executed.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "blocks": "launch__grid_size",
    "waves": "launch__waves_per_multiprocessor",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Names in a record, and what ncu calls them; a metric that a GPU does not have is left out."""
STALL = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
LEAST_STALL = 0.3  # warps that wait for it, for each instruction issued


def run(calls: Sequence[str]) -> None:
    """One call of each shape and number of tokens between the profiler's start and stop, compiled and run before."""
    import torch

    from int8moe.backends.triton import launch
    from int8moe.bench.shapes import named_shape
    from int8moe.device import Platform
    from int8moe.errors import ConfigError
    from int8moe.tuning.measure import Call, layer_of, run_layer

    wrong = [given for given in calls if not re.fullmatch(r"[^:]+:[1-9]\d*(,[1-9]\d*)*", given)]
    if wrong:
        raise SystemExit(f"{wrong[0]!r} is no call: needs SHAPE:M,M,..., as qwen3-30b:512,2048.")
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU, and what is to be measured runs on one.")
    for given in calls:
        name, _, tokens = given.partition(":")
        try:
            config = named_shape(name).config(Platform.current())
        except ConfigError as error:
            raise SystemExit(str(error)) from None
        layer = layer_of(config, "cuda")
        for count in map(int, tokens.split(",")):
            call = Call(config, layer, count, seed=0)
            plan = launch.plan_for(layer, count, config.experts_per_token, call.x, config.num_experts)
            run_layer(layer, call, plan)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            run_layer(layer, call, plan)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
            print(f"{name} M={count}: {plan}", flush=True)


def value(text: str, unit: str) -> float:
    """A number of ncu in microseconds, bytes, bytes a second, or its own unit."""
    number = float(text.replace(",", ""))
    return number * {**MICROSECONDS, **BYTES, **RATES}.get(unit, 1.0)


def read(raw: Path) -> list[dict[str, object]]:
    """One row for each kernel that ncu measured, in the order of their launches."""
    table = list(csv.reader(line for line in raw.read_text(errors="replace").splitlines() if line.startswith('"')))
    if len(table) < 3 or "Kernel Name" not in table[0]:
        raise SystemExit(f"{raw} holds no kernels: it needs what ncu writes with --csv --page raw --log-file.")
    header, units, *rows = table
    kernels = []
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise SystemExit(f"{raw}, kernel {number}: {len(row)} values for {len(header)} metrics; the file is cut.")
        cells = {name: (text, unit) for name, text, unit in zip(header, row, units, strict=True)}
        kernel: dict[str, object] = {"kernel": cells["Kernel Name"][0]}
        for name, metric in METRICS.items():
            if cells.get(metric, ("", ""))[0]:
                kernel[name] = round(value(*cells[metric]), 2)
        stalls = {
            name.removeprefix(STALL[0]).removesuffix(STALL[1]): value(*cell)
            for name, cell in cells.items()
            if name.startswith(STALL[0]) and name.endswith(STALL[1]) and cell[0]
        }
        kernel["stalls"] = {n: round(v, 2) for n, v in sorted(stalls.items(), key=lambda s: -s[1]) if v >= LEAST_STALL}
        kernels.append(kernel)
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="under ncu")
    runs.add_argument("calls", nargs="+", metavar="SHAPE:M,M,...")
    reads = commands.add_parser("read", help="ncu's CSV page of raw metrics")
    reads.add_argument("raw", type=Path)
    reads.add_argument("--out", type=Path, help="write the table here as JSON, too")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.calls)
        return 0
    if not arguments.raw.is_file():
        raise SystemExit(f"{arguments.raw} is no file.")
    kernels = read(arguments.raw)
    for kernel in kernels:
        print(json.dumps(kernel))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"kernels": kernels}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
