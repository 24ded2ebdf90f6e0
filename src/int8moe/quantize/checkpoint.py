"""Convert a float safetensors checkpoint into a compressed-tensors `int-quantized` one, shard by shard.

The result holds `<expert>.weight` int8 [out, in] with `<expert>.weight_scale` [out, 1]; everything else is copied as it
is (FP8 becomes bf16). What becomes what is the plan's (`quantize.plan`); here it is carried out: threads take the
pieces of a shard, a block of rows at a time, and write them to their place in the file, so that memory stays at a few
blocks a thread and the result does not depend on their number. A file gets its final name only when it is whole, and
`config.json` comes last, so an unfinished folder does not load. A state file lets a later run go on where one stopped,
and a lock on the folder keeps two runs apart.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from int8moe.errors import CheckpointError
from int8moe.quantize.compressed_tensors import to_compressed_tensors
from int8moe.quantize.int8 import BLOCK, quantize_rows, row_scales
from int8moe.quantize.plan import INDEX, SCALE_DTYPES, Piece, Plan, Tensor, make_plan, open_shard
from int8moe.quantize.shard_file import ShardFile

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

STATE = ".int8moe-quantize.json"
_TEMPORARY = re.compile(r"^\..+\.\d+\.tmp$")  # as `_write_whole` names them
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done_bytes, total_bytes) after each tensor."""

__all__ = ["INDEX", "STATE", "Plan", "Progress", "QuantizeReport", "make_plan", "quantize_checkpoint"]


@dataclass
class QuantizeReport:
    """What was done. Bytes are of tensors; `worst_error` is the largest |w - scale * q| / scale (at most 0.5)."""

    source: str
    destination: str
    bytes_before: int
    bytes_after: int
    experts_before: int
    experts_after: int
    expert_matrices: int
    dense_matrices: int
    other_tensors: int
    shards: int
    resumed_shards: list[str] = field(default_factory=list)
    seconds: float = 0.0
    verified: bool = False
    worst_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# --- threads -------------------------------------------------------------------------------------------------------


class _Workers:
    """Threads that each run PyTorch's operations on one core; they take the pieces of tensors."""

    def __init__(self, count: int | None) -> None:
        if count is not None and count < 1:
            raise CheckpointError(f"threads is {count}, needs at least 1.")
        self.count = count or len(os.sched_getaffinity(0))

    def __enter__(self) -> _Workers:
        self._before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count, "int8moe-quantize", lambda: torch.set_num_threads(1))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)

    def run(
        self, tensors: Iterable[Tensor], work: Callable[[Tensor, Piece], Any], report: Callable[[Tensor], None]
    ) -> list[Any]:
        """`work` on every piece; its results in order. The first error ends the rest, and is raised."""
        tasks: list[tuple[Tensor, list[Future[Any]]]] = []
        results = []
        try:
            for tensor in tensors:
                tasks.append((tensor, [self._pool.submit(work, tensor, piece) for piece in tensor.pieces]))
            for tensor, futures in tasks:
                results += [future.result() for future in futures]
                report(tensor)
        except BaseException:
            for _, futures in tasks:
                for future in futures:
                    future.cancel()
            for _, futures in tasks:  # those that run write to a file that the caller closes
                for future in futures:
                    if not future.cancelled():
                        future.exception()
            raise
        return results


class _Source:
    """The tensors of one shard, and FP8 scales wherever they lie; memory-mapped, read where they are touched."""

    def __init__(self, plan: Plan, shard: str, file: Any) -> None:
        self.plan = plan
        self._stored = {t.name: file.get_tensor(t.name) for t in plan.shards[shard] if t.pieces}
        self._scales: dict[str, torch.Tensor] = {}
        wanted = {t.scale for t in plan.shards[shard] if t.scale}
        for other, tensors in plan.shards.items():
            names = [t.name for t in tensors if t.name in wanted]
            if names:
                with open_shard(plan.source / other) as holder:
                    self._scales |= {name: holder.get_tensor(name).clone() for name in names}

    def floats(self, tensor: Tensor, piece: Piece, start: int, stop: int) -> torch.Tensor:
        scale = self._scales[tensor.scale] if tensor.scale else None
        return piece.floats(self._stored[tensor.name], scale, self.plan.block, start, stop)

    def bytes_of(self, tensor: Tensor, piece: Piece) -> torch.Tensor:
        """What a copied piece holds, flat."""
        stored = self._stored[tensor.name]
        return (stored if piece.expert is None else piece.rows(stored, 0, piece.shape[0])).reshape(-1)


def _blocks(piece: Piece) -> Iterator[tuple[int, int]]:
    """Row ranges of about `BLOCK` elements."""
    rows, step = piece.shape[0], max(1, BLOCK // max(1, piece.shape[1]))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


# --- writing -------------------------------------------------------------------------------------------------------


def _write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write under a temporary name, sync, rename; on any error nothing stays under either name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} could not be written: {error}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)


def _write_json(path: Path, value: Any) -> None:
    _write_whole(path, lambda p: _put(p, json.dumps(value, indent=2) + "\n"))


def _put(path: Path, text: str) -> None:
    path.write_text(text)


def _convert_shard(
    plan: Plan, shard: str, target: Path, workers: _Workers, report: Callable[[Tensor], None]
) -> dict[str, int]:
    """One shard; returns the bytes of each tensor written."""
    tensors = plan.shards[shard]
    outputs = [out for t in tensors for piece in t.pieces for out in t.outputs(piece, plan.scale_dtype)]

    def write(path: Path) -> None:
        with open_shard(plan.source / shard) as file:
            source, out = _Source(plan, shard, file), ShardFile(path, outputs)
            try:
                workers.run(tensors, lambda t, piece: _convert(source, t, piece, out), report)
            finally:
                out.close()

    _write_whole(target, write)
    return {out.name: out.nbytes for out in outputs}


def _convert(source: _Source, tensor: Tensor, piece: Piece, out: ShardFile) -> None:
    if piece.action == "copy":
        out.put(piece.name, 0, source.bytes_of(tensor, piece))
        return
    for start, stop in _blocks(piece):
        block, at = source.floats(tensor, piece, start, stop), start * piece.shape[1]
        if piece.action == "dequantize":
            out.put(piece.name, at, block.bfloat16())
            continue
        codes, scale = quantize_rows(block, piece.name, SCALE_DTYPES[source.plan.scale_dtype][1], start)
        out.put(piece.name, at, codes)
        out.put(f"{piece.name}_scale", start, scale)


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The compressed-tensors description: W8A8 on Linears, with every Linear that is not int8 ignored by name."""
    return to_compressed_tensors("w8a8", plan.ignored())


def _written_config(plan: Plan) -> dict[str, Any]:
    """The source's configuration with our quantisation in place of its own."""
    config = {k: v for k, v in plan.config.items() if k != "compression_config"}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {
            k: v for k, v in text.items() if k not in ("quantization_config", "compression_config")
        }
    return {**config, "quantization_config": quantization_config(plan)}


def _fingerprint(plan: Plan) -> dict[str, Any]:
    """What a resumed run must find unchanged."""
    stats = {name: (plan.source / name).stat() for name in plan.shards}
    return {
        "format": 2,
        "scale_dtype": plan.scale_dtype,
        "targets": plan.targets,
        "source": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
        "config": plan.config,
    }


@contextlib.contextmanager
def _only_one(destination: Path) -> Iterator[None]:
    """Hold the folder against other conversions. The kernel lets go of it when a process ends, however
    it ends, and no file has to be removed.

    Raises:
        CheckpointError: another conversion into it is running.
    """
    if fcntl is None:
        yield
        return
    try:
        folder = os.open(destination, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be opened: {error.strerror or error}.") from None
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(
                    f"another conversion into {destination} is running; needs to wait for its end, or another folder."
                ) from None
            logger.warning(
                "%s cannot be locked (%s), so a second conversion into it at the same time would not be noticed.",
                destination, error.strerror,
            )  # fmt: skip
        yield
    finally:
        os.close(folder)


def _check_destination(plan: Plan, destination: Path) -> None:
    """Make the folder; it may hold something."""
    source, target = plan.source.resolve(), destination.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(
            f"{destination} and {plan.source} are the same folder or one inside the other; needs two apart."
        )
    if os.path.lexists(destination) and not destination.is_dir():
        raise CheckpointError(f"{destination} is a file or a broken link, needs a folder (or a name that is free).")
    try:
        destination.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be made: {error.strerror or error}.") from None


def _prepare_destination(plan: Plan, destination: Path, overwrite: bool) -> dict[str, Any]:
    """Look into the folder; returns the state of an earlier run to go on from, or a fresh one."""
    fresh = {**_fingerprint(plan), "done": {}}
    for left in destination.glob(f".{STATE}.*.tmp"):  # of a run that was killed before it wrote anything else
        left.unlink()
    if any(destination.iterdir()):
        state: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((destination / STATE).read_text())
        if not (isinstance(state, dict) and isinstance(state.get("done"), dict)):
            state = {}
        if not overwrite and not state:
            raise CheckpointError(
                f"{destination} is not empty; give another folder, or --overwrite to replace what is there."
            )
        if not overwrite and {k: v for k, v in state.items() if k != "done"} == {
            k: v for k, v in fresh.items() if k != "done"
        }:
            _check_space(plan, destination, set(state["done"]))
            for left in destination.iterdir():  # of a run that was killed
                if left.is_file() and _TEMPORARY.match(left.name):
                    left.unlink()
            return state
        if not overwrite:
            raise CheckpointError(
                f"{destination} holds an unfinished conversion of another source, or with other options;"
                " --overwrite starts again."
            )
        olds = [
            old
            for old in destination.iterdir()
            if old.is_file()
            and (
                old.suffix == ".safetensors" or _TEMPORARY.match(old.name) or old.name in ("config.json", INDEX, STATE)
            )
        ]
        _check_space(plan, destination, set(), sum(old.stat().st_size for old in olds))
        for old in olds:
            old.unlink()
    _check_space(plan, destination, set())
    return fresh


def _check_space(plan: Plan, destination: Path, done: set[str], given_up: int = 0) -> None:
    """Before anything is written or removed."""
    needed = sum(t.output_bytes(plan.scale_dtype) for t in plan.tensors if t.shard not in done)
    free = shutil.disk_usage(destination).free + given_up
    if needed > free:
        raise CheckpointError(f"{destination} has {free:,} bytes free, and the conversion writes {needed:,}.")


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    scale_dtype: str = "float32",
    targets: str = "experts",
    threads: int | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Convert `source` into `destination`; goes on where an interrupted run stopped.

    Args:
        scale_dtype: "float32" keeps the scales exact (a model read from disk has the bits of one quantised while
            loading); "bfloat16" is what llm-compressor writes.
        targets: "experts"; "experts+shared" for the Linears of shared experts too; "all-linear" for all but output
            heads, embeddings, routers and gates.
        threads: default: the processor's cores. The result does not depend on it.
        overwrite: replace a checkpoint that is there.
        verify: read the result back and compare it with the source.
    Raises:
        CheckpointError: the source is damaged or not of a known kind, the disk is too small, another conversion into
            the folder is running, the result is wrong.
        NonFiniteWeight: a weight holds NaN or infinity.
    """
    destination = Path(destination)
    workers = _Workers(threads)
    plan = make_plan(source, scale_dtype, targets)
    _check_destination(plan, destination)
    with _only_one(destination):
        return _convert_all(plan, destination, workers, overwrite, verify, progress)


def _convert_all(
    plan: Plan, destination: Path, workers: _Workers, overwrite: bool, verify: bool, progress: Progress | None
) -> QuantizeReport:
    """Every shard, then what goes beside them."""
    begin = time.monotonic()
    state = _prepare_destination(plan, destination, overwrite)
    done: dict[str, dict[str, int]] = state["done"]
    whole = {s for s, sizes in done.items() if (destination / s).is_file() and s in plan.shards and sizes}
    sizes = plan.bytes()
    _write_json(destination / STATE, state)

    passes = 2 if verify else 1
    total, finished = sizes["before"] * passes, 0

    def step(what: str) -> Callable[[Tensor], None]:
        def report(tensor: Tensor) -> None:
            nonlocal finished
            finished += tensor.nbytes
            if progress:
                progress(what, finished, total)

        return report

    worst = None
    with workers:
        for shard in plan.shards:
            if shard in whole:
                for tensor in plan.shards[shard]:
                    step(f"{shard}: done before")(tensor)
                continue
            done[shard] = _convert_shard(plan, shard, destination / shard, workers, step(f"quantise {shard}"))
            _write_json(destination / STATE, state)
        if verify:
            worst = _verify(plan, destination, workers, step)

    quantized = [t.routed for t in plan.tensors for piece in t.pieces if piece.action == "quantize"]
    report = QuantizeReport(
        str(plan.source), str(destination), sizes["before"], sizes["after"], sizes["experts_before"],
        sizes["experts_after"],
        expert_matrices=sum(quantized),
        dense_matrices=len(quantized) - sum(quantized),
        other_tensors=sum(all(p.action != "quantize" for p in t.pieces) and bool(t.pieces) for t in plan.tensors),
        shards=len(plan.shards),
        resumed_shards=sorted(whole),
        verified=verify,
        worst_error=worst,
    )  # fmt: skip
    if set(plan.shards) != {"model.safetensors"}:
        weight_map = {name: shard for shard, names in done.items() for name in names}
        total_size = sum(n for names in done.values() for n in names.values())
        _write_json(
            destination / INDEX,
            {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))},
        )
    for file in sorted(plan.source.iterdir()):
        if (
            file.is_file()
            and file.suffix not in _NOT_COPIED
            and file.name not in ("config.json", INDEX)
            and not file.name.startswith(".")
        ):
            _write_whole(destination / file.name, lambda p, f=file: _copy(f, p))  # type: ignore[misc]
    _write_json(destination / "config.json", _written_config(plan))
    (destination / STATE).unlink()
    report.seconds = round(time.monotonic() - begin, 3)
    return report


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _verify(plan: Plan, destination: Path, workers: _Workers, step: Callable[[str], Callable[[Tensor], None]]) -> float:
    """Read the result back; returns the worst error in steps. Every shard that is wrong is removed, so that a later
    run converts it again, and the first one's error raised."""
    worst, wrong = 0.0, []
    for shard in plan.shards:
        try:
            worst = max(worst, _verify_shard(plan, shard, destination / shard, workers, step(f"verify {shard}")))
        except CheckpointError as error:
            (destination / shard).unlink(missing_ok=True)
            wrong.append(error)
    if wrong:
        raise wrong[0]
    return worst


def _verify_shard(plan: Plan, shard: str, result: Path, workers: _Workers, report: Callable[[Tensor], None]) -> float:
    """Every code within half a step of its weight, everything else equal byte for byte."""
    tensors = plan.shards[shard]
    with open_shard(plan.source / shard) as before, open_shard(result) as after:
        names = set(after.keys())
        for t in tensors:
            for out in (out for piece in t.pieces for out in t.outputs(piece, plan.scale_dtype)):
                if out.name not in names:
                    raise CheckpointError(f"{result}: {out.name} is missing.")
                view = after.get_slice(out.name)
                if (view.get_dtype(), tuple(view.get_shape())) != (out.dtype, out.shape):
                    raise CheckpointError(f"{result}: {out.name} has the wrong dtype or shape.")
        source, made = _Source(plan, shard, before), {name: after.get_tensor(name) for name in names}
        errors = workers.run(tensors, lambda t, piece: _verify_piece(source, t, piece, made, result), report)
    return max(errors, default=0.0)


def _verify_piece(source: _Source, tensor: Tensor, piece: Piece, made: dict[str, torch.Tensor], where: Path) -> float:
    """The worst error of a quantised piece in steps, 0 for one that is equal."""
    worst = 0.0
    if piece.action == "copy":
        if not _same(source.bytes_of(tensor, piece), made[piece.name].reshape(-1)):
            raise CheckpointError(f"{where}: {piece.name} differs from the source.")
        return worst
    # The scale itself may be rounded to bfloat16, which moves the largest weight of a row past the last code.
    bound, rounding = (0.5, 2**-22) if source.plan.scale_dtype == "float32" else (0.75, 2**-8)
    for start, stop in _blocks(piece):
        want, got = source.floats(tensor, piece, start, stop), made[piece.name][start:stop]
        if piece.action == "dequantize":
            if not _same(want.bfloat16(), got):
                raise CheckpointError(f"{where}: {piece.name} is not the source's FP8 times its scales.")
            continue
        want, scale = want.float(), made[f"{piece.name}_scale"][start:stop].float()
        # The scales are held to the source too: measured in steps of a wrong one, any error looks small.
        if not torch.allclose(scale, row_scales(want)[:, None], rtol=rounding, atol=0.0):
            raise CheckpointError(f"{where}: {piece.name}_scale is not max|w| / 127 of the source's rows.")
        error = float(got.float().mul_(scale).sub_(want).abs_().div_(scale).max()) if want.numel() else 0.0
        if not error <= bound * (1 + 1e-4):
            raise CheckpointError(f"{where}: {piece.name} is off by {error:.3g} steps, at most {bound} expected.")
        worst = max(worst, error)
    return worst


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN included)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
