"""Run CPU layers for a long time with changing token counts, thread counts and layers, two Python threads at once.

    python benchmarks/soak_cpu.py --minutes 10 --out FILE.json

Every call's output must have the bits of the first call with the same layer and input, and the process must not grow.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import threading
import time
from types import SimpleNamespace

import torch

from int8moe.backends.cpu.support import CPUExpertsInt8
from int8moe.config import FusedMoEConfig
from int8moe.device import Platform
from int8moe.quant_config import int8_w8a8_moe_quant_config

SHAPES = [(64, 8, 1024, 512), (8, 2, 512, 1024), (16, 4, 96, 130), (128, 8, 256, 192)]
TOKENS = [0, 1, 2, 3, 7, 16, 33, 64, 200]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Layer:
    def __init__(self, shape: tuple[int, int, int, int], seed: int) -> None:
        E, topk, H, I = shape
        g = torch.Generator().manual_seed(seed)
        code = lambda *s: torch.randint(-128, 128, s, dtype=torch.int8, generator=g)
        quant = int8_w8a8_moe_quant_config(
            torch.rand(E, 2 * I, generator=g) * 1e-3, torch.rand(E, H, generator=g) * 1e-3
        )
        self.experts = CPUExpertsInt8(FusedMoEConfig(E, topk, H, I, platform=Platform.cpu()), quant)
        self.experts.process_weights_after_loading(
            SimpleNamespace(w13_weight=code(E, 2 * I, H), w2_weight=code(E, H, I))
        )
        self.calls = {}
        for m in TOKENS:
            x = torch.randn(m, H, generator=g).bfloat16()
            weights, ids = torch.rand(m, E, generator=g).softmax(-1).topk(topk, dim=-1)
            call = (x, weights.float().contiguous(), ids)
            self.calls[m] = (call, self.experts.apply(*call))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    layers = [Layer(shape, seed) for seed, shape in enumerate(SHAPES)]
    most = os.cpu_count() or 1
    done, wrong, stop = [0, 0], [], time.monotonic() + args.minutes * 60

    def work(index: int) -> None:
        rng = random.Random(index)
        while time.monotonic() < stop and not wrong:
            torch.set_num_threads(rng.randint(1, most + 1))
            layer, m = rng.choice(layers), rng.choice(TOKENS)
            call, want = layer.calls[m]
            if not torch.equal(layer.experts.apply(*call), want):
                wrong.append((layer.experts.config, m))
            done[index] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    memory = []
    while any(t.is_alive() for t in threads):
        time.sleep(min(5.0, args.minutes * 6))
        memory.append(resident_bytes())
        print(f"{sum(done)} calls, {memory[-1] >> 20} MiB resident", flush=True)
    record = {
        "date": datetime.date.today().isoformat(), "machine": Platform.cpu().name, "isa": layers[0].experts._run.isa,
        "minutes": args.minutes, "calls": sum(done), "wrong": len(wrong), "resident_mib_start": memory[0] >> 20,
        "resident_mib_end": memory[-1] >> 20, "resident_mib_most": max(memory) >> 20,
    }  # fmt: skip
    print(json.dumps(record))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(record, file, indent=1)
    if wrong:
        raise SystemExit(f"a result changed: {wrong[0]}")


if __name__ == "__main__":
    main()
