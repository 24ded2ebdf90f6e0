"""Whether models of Transformers with INT8 experts do on a GPU, and over a GPU and the CPU, what they do on the CPU.

    PYTHONPATH=src:tests python3 benchmarks/gpu_transformers.py --out OUT --seconds 110

Tiny random models of Transformers' own classes (tests/families.py) are saved and converted first. Then every check runs
by itself, so that one that fails hides no other: device maps, moves, generation, compilation, gradients, saving.
Experts are held to the CPU's bits; logits only to a tolerance, since attention and router are PyTorch's own and round
otherwise on a GPU. Each family has a process of its own. Prints a line for each check and keeps
OUT/gpu_transformers.json up to date; exit code 1 if anything failed. A check that had not started when the time was up,
or whose process died before, is counted as not run.

`--cpu` runs all of it without a GPU, to see that the script itself works: a second name of the CPU stands for the GPU.
`--only TEXT` runs the checks whose name holds TEXT. Device maps need accelerate; the native CPU kernel has to be built.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import int8moe
import int8moe.transformers as it
from families import make_model
from int8moe.device import Platform
from int8moe.errors import Int8MoeError
from int8moe.quantize.checkpoint import quantize_checkpoint

SIZES = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32},
    "mixtral": {"hidden_size": 128, "intermediate_size": 64},
}
PROMPT, NEW = 9, 6
IDS = torch.arange(2 * PROMPT).reshape(2, PROMPT) * 7 % 320
TOLERANCE = 2e-2
"""Of logits, relative, in float32: a sum that rounds otherwise may move an int8 code of an activation by one."""
Facts = dict[str, Any]


@dataclass
class Machine:
    """Where things run. On a plain machine `gpu` is the CPU under another name.

    Args:
        gpu: as device maps name it; device: as tensors know it. backend: what "auto" has to choose there.
    """

    gpu: str
    device: str
    backend: str
    compiler: str

    @property
    def real(self) -> bool:
        return self.device != "cpu"


@dataclass
class Models:
    """One family: its checkpoints, and what the CPU makes of them."""

    kind: str
    folder: Path
    machine: Machine
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def original(self) -> Path:
        path = self.folder / "original"
        self._once("float", lambda: make_model(self.kind, path, torch.float32, **SIZES[self.kind]))
        return path

    @property
    def int8(self) -> Path:
        path = self.folder / "int8"
        self._once("int8", lambda: quantize_checkpoint(self.original, path))
        return path

    @property
    def cpu(self) -> Any:
        return self._once("cpu", lambda: it.load(self.original, "cpu"))

    @property
    def gpu(self) -> Any:
        return self._once("gpu", lambda: it.load(self.original, device=self.machine.device))

    @property
    def want(self) -> torch.Tensor:
        return self._once("want", lambda: logits(self.cpu))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def placed(self, on_cpu: str) -> dict[str, str]:
        """Everything on the GPU, but what `on_cpu` names; of the first layer its parts are listed."""
        gpu = self.machine.gpu
        top = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.1"]
        first = self.cpu.model.layers[0]
        parts = [f"model.layers.0.{n}" for n, _ in first.named_children() if n != "mlp"]
        parts += [f"model.layers.0.mlp.{n}" for n, _ in first.mlp.named_children()]
        return {n: gpu for n in (top if on_cpu == "model.layers.0" else top + parts)} | {on_cpu: "cpu"}


# --- looking at a model ----------------------------------------------------------------------------------------------


def experts_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, it.Int8Experts)]


def backends(model: Any) -> list[str | None]:
    """Of each layer, in order."""
    by_name = {name: report.backend for report in it.explain_model(model) for name in report.layers}
    return [by_name[n] for n, m in model.named_modules() if isinstance(m, it.Int8Experts)]


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(IDS.to(model.device)).logits.float().cpu()


def near(got: torch.Tensor, want: torch.Tensor) -> float:
    error = float((got - want).norm() / want.norm())
    assert error < TOLERANCE, f"logits differ from the CPU's by {error:.3g}, at most {TOLERANCE} expected"
    return error


@torch.inference_mode()
def same_experts(got: Any, want: Any) -> int:
    """Every experts module of both models on the same input, wherever it is; bit for bit. Returns how many."""
    pairs = list(zip(experts_of(got), experts_of(want), strict=True))
    for layer, (one, other) in enumerate(pairs):
        layout, dtype = one._int8.layout, one._int8.in_dtype
        generator = torch.Generator().manual_seed(layer)
        for tokens in (1, 2, 18, 70):
            x = torch.randn(tokens, layout.hidden, generator=generator).to(dtype)
            ids = torch.stack([torch.randperm(layout.num_experts, generator=generator)[:2] for _ in range(tokens)])
            weights = torch.rand(tokens, 2, generator=generator)
            outputs = [m(x.to(d), ids.to(d), weights.to(d)).cpu() for m, d in ((one, one._int8.device), (other, "cpu"))]
            assert torch.equal(*outputs), (
                f"layer {layer}, {tokens} tokens: experts on {one._int8.device} differ from the CPU's by"
                f" {float((outputs[0].double() - outputs[1].double()).abs().max()):.3g}"
            )
    return len(pairs)


def agrees(model: Any, models: Models, expected: Sequence[str]) -> Facts:
    """The right backends, the CPU's experts, its logits within the tolerance."""
    found = backends(model)
    assert found == list(expected), f"backends are {found}, expected {list(expected)}"
    error = near(logits(model), models.want)
    return {"backends": found, "logits_error": error, "experts_bit_equal": same_experts(model, models.cpu)}


def one_line(error: Exception) -> Facts:
    assert "\n" not in str(error), f"more than one line: {error}"
    return {"says": str(error)}


# --- the checks ------------------------------------------------------------------------------------------------------


def loaded_on_the_gpu(m: Models) -> Facts:
    return agrees(m.gpu, m, [m.machine.backend] * 2)


def int8_folder_on_the_gpu(m: Models) -> Facts:
    return agrees(it.load(m.int8, device=m.machine.device), m, [m.machine.backend] * 2)


def in_bfloat16(m: Models) -> Facts:
    gpu, cpu = (
        it.load(m.original, device=m.machine.device, dtype="bfloat16"),
        it.load(m.original, "cpu", dtype="bfloat16"),
    )
    got, want = logits(gpu), logits(cpu)  # attention alone rounds so much that a router may choose otherwise
    return {"experts_bit_equal": same_experts(gpu, cpu), "logits_error": float((got - want).norm() / want.norm())}


def from_pretrained_with_a_map(m: Models) -> Facts:
    model = tf.AutoModelForCausalLM.from_pretrained(
        m.original, quantization_config=it.Int8MoeConfig(backend="auto"), device_map=m.placed("model.layers.0")
    )
    return agrees(model, m, ["CPU", m.machine.backend]) | {"devices": [str(e._int8.device) for e in experts_of(model)]}


def a_layer_on_the_cpu(m: Models) -> Facts:
    return agrees(it.load(m.int8, device_map=m.placed("model.layers.0")), m, ["CPU", m.machine.backend])


def experts_on_the_cpu(m: Models) -> Facts:
    """Attention on the GPU, the experts of a layer where the memory is."""
    model = it.load(m.int8, device_map=m.placed("model.layers.0.mlp.experts"))
    found = agrees(model, m, ["CPU", m.machine.backend])
    text = generated(model, m)
    model.save_pretrained(m.folder / "split")
    assert torch.equal(logits(it.load(m.folder / "split", "cpu")), m.want), "saved from a split model, other bits"
    return found | {"tokens_as_on_the_cpu": text}


def automatic_map(m: Models) -> Facts:
    found = {}
    for what, source in (("original", m.original), ("int8", m.int8)):
        model = it.load(source, device_map="auto")
        found[what] = agrees(model, m, [m.machine.backend] * 2) | {"map": str(getattr(model, "hf_device_map", None))}
    return found


def automatic_map_with_little_memory(m: Models) -> Facts:
    """As much on the GPU as one layer needs: the other has to be on the CPU."""
    if not m.machine.real:
        return {"skipped": "accelerate gives no memory to a device that is not there"}
    size = sum(p.numel() * p.element_size() for p in m.cpu.parameters()) + it.experts_bytes(m.cpu)
    model = it.load(m.int8, device_map="auto", max_memory={0: int(0.75 * size), "cpu": 1 << 30})
    places = {str(v) for v in model.hf_device_map.values()}
    error = near(logits(model), m.want)
    return {
        "map": str(model.hf_device_map), "both_used": len(places) > 1, "backends": backends(model),
        "logits_error": error, "experts_bit_equal": same_experts(model, m.cpu),
    }  # fmt: skip


def the_disk_is_refused(m: Models) -> Facts:
    placed = m.placed("model.layers.0") | {"model.layers.0": "disk"}
    try:
        it.load(m.int8, device_map=placed, offload_folder=str(m.folder / "disk"))
    except Int8MoeError as error:
        return one_line(error)
    raise AssertionError("a layer on the disk was taken")


def moved_there_and_back(m: Models) -> Facts:
    model = it.load(m.int8, device="cpu")
    assert torch.equal(logits(model), m.want)
    model.to(m.machine.device)
    there = agrees(model, m, [m.machine.backend] * 2)
    model.to("cpu")
    assert backends(model) == ["CPU", "CPU"]
    assert torch.equal(logits(model), m.want), "back on the CPU, other bits"
    return there


def a_named_backend_does_not_move(m: Models) -> Facts:
    if not m.machine.real:
        return {"skipped": "needs a GPU"}
    try:
        it.load(m.int8, "cpu").to(m.machine.device)
    except Int8MoeError as error:
        return one_line(error)
    raise AssertionError("backend 'cpu' was moved to the GPU")


def generated(model: Any, m: Models, **more: Any) -> bool:
    """Greedy tokens; whether they are the CPU's (a close choice may fall otherwise)."""
    arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    tokens = [lm.generate(IDS.to(lm.device), **arguments, **kw).cpu() for lm, kw in ((model, more), (m.cpu, {}))]
    assert tokens[0].shape == (2, PROMPT + NEW) and torch.equal(tokens[0][:, :PROMPT], IDS)
    return torch.equal(*tokens)


def generates(m: Models) -> Facts:
    dynamic = generated(m.gpu, m)
    static = generated(m.gpu, m, cache_implementation="static", disable_compile=True)
    return {"dynamic_as_on_the_cpu": dynamic, "static_as_on_the_cpu": static}


def saved_from_the_gpu(m: Models) -> Facts:
    m.gpu.save_pretrained(m.folder / "saved")
    assert it.is_int8_checkpoint(m.folder / "saved")
    assert torch.equal(logits(it.load(m.folder / "saved", "cpu")), m.want), "saved from the GPU, other bits"
    return {}


def copied_and_pickled(m: Models) -> Facts:
    found = agrees(copy.deepcopy(m.gpu), m, [m.machine.backend] * 2)
    torch.save(m.gpu, m.folder / "model.pt")
    there = torch.load(m.folder / "model.pt", weights_only=False)
    here = torch.load(m.folder / "model.pt", weights_only=False, map_location="cpu")
    assert backends(there) == [m.machine.backend] * 2 and backends(here) == ["CPU", "CPU"]
    assert torch.equal(logits(here), m.want), "from the GPU to the CPU by a file, other bits"
    return found


def gradients(m: Models) -> Facts:
    """An adapter on the attention, by hand: gradients of a low-rank change, and a few steps that lower the loss."""
    found: Facts = {}
    grads = {}
    for what, lm in (("cpu", it.load(m.original, "cpu")), ("gpu", it.load(m.original, device=m.machine.device))):
        lm.requires_grad_(False)
        before = {n: t.clone() for n, t in lm.state_dict().items() if ".experts." in n}
        projection = lm.model.layers[0].self_attn.q_proj
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(4, projection.in_features, generator=generator).to(lm.device).requires_grad_()
        b = (torch.randn(projection.out_features, 4, generator=generator) * 0.01).to(lm.device).requires_grad_()
        projection.register_forward_hook(lambda _m, args, out, a=a, b=b: out + args[0] @ a.T @ b.T)
        optimiser, losses = torch.optim.Adam([a, b], lr=1e-3), []
        ids = IDS.to(lm.device)
        for step in range(6):
            optimiser.zero_grad()
            loss = lm(ids, labels=ids).loss
            loss.backward()
            if step == 0:
                grads[what] = [a.grad.cpu(), b.grad.cpu()]
            optimiser.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0], losses
        after = lm.state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before), "int8 weights changed"
        found[f"losses_{what}"] = [round(x, 4) for x in losses]
    errors = [float((g - c).norm() / c.norm()) for g, c in zip(grads["gpu"], grads["cpu"], strict=True)]
    assert max(errors) < 5 * TOLERANCE, f"gradients differ from the CPU's by {max(errors):.3g}"
    return found | {"gradient_errors": errors}


def adapters_of_peft(m: Models) -> Facts:
    try:
        import peft
    except ImportError:
        return {"skipped": "peft is not installed"}
    lm = it.load(m.int8, device=m.machine.device)
    before = {n: t.clone() for n, t in lm.state_dict().items() if ".experts." in n}
    model = peft.get_peft_model(lm, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = IDS.to(lm.device), []
    for _ in range(6):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], losses
    after = lm.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before), "int8 weights changed"
    merged = model.merge_and_unload()
    merged.save_pretrained(m.folder / "merged")
    return {
        "peft": peft.__version__,
        "losses": losses,
        "merged_error": near(logits(it.load(m.folder / "merged", "cpu")), logits(merged)),
    }


def compiled_decode_step(m: Models) -> Facts:
    """One token after a prompt, whole graph, static cache."""
    model, ids = m.gpu, IDS.to(m.gpu.device)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend=m.machine.compiler)):
        cache = tf.StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
        with torch.inference_mode():
            first = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            for at in range(PROMPT, PROMPT + 3):
                out = run(
                    first, past_key_values=cache, use_cache=True, cache_position=torch.tensor([at], device=ids.device),
                    position_ids=torch.tensor([[at]], device=ids.device).expand(2, 1),
                ).logits  # fmt: skip
                first = out[:, -1:].argmax(-1)
        results.append(out.float().cpu())
    return {"compiler": m.machine.compiler, "logits_error": near(results[1], results[0])}


def compiled_generation(m: Models) -> Facts:
    """As Transformers compiles a static cache's decoding by itself: reduce-overhead, which records CUDA graphs."""
    arguments = {"fullgraph": True}
    if not m.machine.real:
        arguments |= {"backend": m.machine.compiler, "mode": None}
    config = tf.CompileConfig(**arguments)
    config._compile_all_devices = True
    return {"as_on_the_cpu": generated(m.gpu, m, cache_implementation="static", compile_config=config)}


CHECKS: dict[str, Callable[[Models], Facts]] = {
    check.__name__: check
    for check in (
        loaded_on_the_gpu, int8_folder_on_the_gpu, from_pretrained_with_a_map, a_layer_on_the_cpu, experts_on_the_cpu,
        automatic_map, automatic_map_with_little_memory, the_disk_is_refused, moved_there_and_back,
        a_named_backend_does_not_move, generates, saved_from_the_gpu, copied_and_pickled, gradients, adapters_of_peft,
        in_bfloat16, compiled_decode_step, compiled_generation,
    )
}  # fmt: skip
"""In the order in which they run: the slow ones last."""


# --- the command -----------------------------------------------------------------------------------------------------


def pretend(monkey: Any) -> Machine:
    """accelerate takes `cpu:0` for a device of its own, and `cpu` for the place to offload to."""
    move = monkey.set_module_tensor_to_device
    plain = lambda device: "cpu" if str(device) == "cpu:0" else device
    monkey.set_module_tensor_to_device = lambda module, name, device, **more: move(module, name, plain(device), **more)
    return Machine("cpu:0", "cpu", "CPU", "aot_eager")


def facts_of_the_machine(machine: Machine) -> Facts:
    versions = {}
    for name in ("torch", "transformers", "accelerate", "peft", "triton"):
        try:
            versions[name] = __import__(name).__version__
        except ImportError:
            versions[name] = None
    gpu = torch.cuda.get_device_name() if machine.real else None
    return {
        "date": datetime.date.today().isoformat(), "int8moe": getattr(int8moe, "__version__", None), "gpu": gpu,
        "cpu": Platform.cpu().name, "python": sys.version.split()[0], **versions,
    }  # fmt: skip


def run(check: Callable[[Models], Facts], models: Models) -> Facts:
    start = time.monotonic()
    result: Facts = {"check": check.__name__, "family": models.kind}
    try:
        facts = check(models)
        result |= {"result": "skipped" if "skipped" in facts else "passed", **facts}
    except Exception as error:  # whatever it is, the next check runs
        result |= {
            "result": "failed",
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-3000:],
        }
    result["seconds"] = round(time.monotonic() - start, 2)
    return result


def start(cpu: bool) -> Machine:
    """In every process: what the checks run on."""
    tf.utils.logging.set_verbosity_error()
    tf.utils.logging.disable_progress_bar()
    torch.set_num_threads(1 if cpu else 4)  # tiny matrices, and several processes
    if not cpu:
        return Machine("cuda:0", "cuda:0", "TRITON", "inductor")
    os.environ["INT8MOE_DEVICE"] = "cpu"
    import accelerate.hooks

    return pretend(accelerate.hooks)


def work(kind: str, names: list[str], cpu: bool, deadline: float, results: Any) -> None:
    """The checks of one family, in order; each result is sent as soon as it is there."""
    machine = start(cpu)
    if not names:
        return
    results.put(facts_of_the_machine(machine))
    with tempfile.TemporaryDirectory() as folder:
        models = Models(kind, Path(folder), machine)
        for name in names:
            late = time.time() > deadline
            results.put({"check": name, "family": kind, "result": "not run"} if late else run(CHECKS[name], models))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of gpu_transformers.json")
    parser.add_argument("--seconds", type=float, default=100.0, help="no check starts after that; ended 15 s later")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, to see that the script works")
    parser.add_argument("--only", default="", help="checks and families whose name holds this")
    arguments = parser.parse_args(given)
    deadline = time.time() + arguments.seconds
    if not arguments.cpu and not torch.cuda.is_available():
        print("needs a CUDA GPU, or --cpu")
        return 2
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    todo = {kind: [n for n in CHECKS if arguments.only in f"{kind}: {n}"] for kind in SIZES}
    children = {
        kind: context.Process(target=work, args=(kind, names, arguments.cpu, deadline, results), daemon=False)
        for kind, names in todo.items()
    }
    report: Facts = {"machine": None, "checks": []}
    for child in children.values():
        child.start()
    while True:
        alive = any(child.is_alive() for child in children.values())
        try:
            note(report, results.get(timeout=1.0), arguments.out)
        except queue.Empty:
            if not alive:
                break
        if time.time() > deadline + 15.0:
            break
    seen = {(c["family"], c["check"]) for c in report["checks"]}
    for kind, child in children.items():
        if child.is_alive():
            child.kill()
        child.join()
        for name in todo[kind]:
            if (kind, name) not in seen:
                why = f"its process ended with {child.exitcode} before the result was there"
                note(report, {"check": name, "family": kind, "result": "not run", "error": why}, arguments.out)
    print(", ".join(f"{count} {what}" for what, count in report.get("summary", {}).items()))
    return 1 if any(c["result"] == "failed" or "error" in c for c in report["checks"]) else 0


def note(report: Facts, result: Facts, out: Path | None) -> None:
    if "check" not in result:
        report["machine"] = result
        return
    report["checks"].append(result)
    line = f"{result['result']:8}{result.get('seconds', 0):7.2f} s  {result['family']}: {result['check']}"
    print(f"{line}  {result.get('error', '')}", flush=True)
    report["summary"] = {
        what: sum(c["result"] == what for c in report["checks"]) for what in ("passed", "failed", "skipped", "not run")
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu_transformers.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
