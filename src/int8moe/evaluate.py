"""How much a model's answers change in INT8: perplexity of a text, and agreement of next-token choices.

Sliding windows: a window of `context` tokens moves by `stride`; each token after the first is scored exactly once,
by the first window that holds it, so later windows score their last `stride` tokens with `context - stride` before.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from int8moe.errors import CheckpointError, ConfigError, Int8MoeError
from int8moe.layer_errors import LayerErrors

MAX_CONTEXT = 1024
LOGITS_BYTES = 256 << 20  # bound of one batch's float32 logits; also bounds the batch
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
ROWS = 256  # positions whose log-softmax is held at once


class EvaluationError(Int8MoeError, ValueError):
    """A text, or a pair of models, that cannot be evaluated."""


@dataclass
class Text:
    """A text as token ids.

    Args:
        ids: int64 [N], N >= 2.
        scored_bytes: UTF-8 bytes that the tokens after the first stand for.
    """

    ids: torch.Tensor
    scored_bytes: int


@dataclass
class Score:
    """One model on one text: sums over the scored tokens.

    Args:
        nll: sum of -log p(token), nats.
        non_finite: scored positions whose logits hold NaN or infinity.
        seconds: time spent in the model's forward.
        model_tokens: tokens the model was given (windows overlap).
    """

    tokens: int = 0
    scored_bytes: int = 0
    nll: float = 0.0
    non_finite: int = 0
    seconds: float = 0.0
    model_tokens: int = 0

    @property
    def nll_per_token(self) -> float:
        return self.nll / self.tokens if self.tokens else math.nan

    @property
    def nll_per_byte(self) -> float:
        return self.nll / self.scored_bytes if self.scored_bytes else math.nan

    @property
    def perplexity(self) -> float:
        mean = self.nll_per_token
        return math.exp(mean) if mean < 700 else mean if math.isnan(mean) else math.inf

    @property
    def tokens_per_second(self) -> float:
        return self.model_tokens / self.seconds if self.seconds else math.nan

    def to_dict(self) -> dict[str, Any]:
        derived = ("nll_per_token", "nll_per_byte", "perplexity", "tokens_per_second")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass
class Comparison:
    """Two models on the same text.

    Args:
        agreement: share of scored positions where both would choose the same next token.
        kl: mean KL(baseline || candidate) a token, nats; None where the models were not in memory together.
    """

    baseline: Score
    candidate: Score
    agreement: float
    kl: float | None
    context: int
    stride: int
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def difference_percent(self) -> float:
        return 100.0 * (self.candidate.perplexity / self.baseline.perplexity - 1.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline.to_dict(),
            "int8": self.candidate.to_dict(),
            "perplexity_difference_percent": self.difference_percent,
            "agreement": self.agreement,
            "kl": self.kl,
            "context": self.context,
            "stride": self.stride,
            **self.details,
        }


def read_text(path: str | os.PathLike[str]) -> str:
    """A UTF-8 text file.

    Raises:
        EvaluationError: not UTF-8, or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}."
        ) from None
    if not text.strip():
        raise EvaluationError(f"{path} is empty, needs a text of at least 2 tokens.")
    return text


def tokenize(tokenizer: Any, text: str, max_tokens: int | None = None, where: str = "the text") -> Text:
    """`text` as the tokenizer writes it (with its own special tokens), cut to the first `max_tokens`.

    Raises:
        EvaluationError: fewer than 2 tokens.
    """
    fast = bool(getattr(tokenizer, "is_fast", False))
    encode = lambda part: tokenizer(part, return_offsets_mapping=fast, verbose=False)
    # A long text is cut first, since tokenising it all takes minutes; a token seldom spans 32 characters.
    encoded = encode(text if max_tokens is None else text[: 32 * max_tokens])
    if max_tokens is not None and len(encoded["input_ids"]) < max_tokens and len(text) > 32 * max_tokens:
        encoded = encode(text)
    ids = list(encoded["input_ids"])[:max_tokens]
    if len(ids) < 2:
        raise EvaluationError(f"{where} has {len(ids)} token(s), needs at least 2.")
    if fast:
        spans = encoded["offset_mapping"][: len(ids)]
        scored = text[spans[0][1] : max(end for _, end in spans)]
    else:
        scored = tokenizer.decode(ids[1:], skip_special_tokens=True)
    return Text(torch.tensor(ids, dtype=torch.int64), len(scored.encode("utf-8", "replace")))


def context_of(model: Any, context: int | None, text: Text) -> int:
    """Window length: as asked, else what the model has positions for, at most 1024; never more than the text.

    Raises:
        ConfigError: below 2, or more than the model has positions for.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    if context is None:
        context = min(MAX_CONTEXT, limit or MAX_CONTEXT)
    if context < 2:
        raise ConfigError(f"context is {context}, needs 2 or more.")
    if limit is not None and context > limit:
        raise ConfigError(f"context is {context}, needs at most {limit}: the model has no more positions.")
    return min(context, len(text.ids))


@dataclass(frozen=True)
class Window:
    """Tokens start..start+length, of which the last `scored` are scored."""

    start: int
    length: int
    scored: int


def windows(tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Windows that score each of tokens 1..tokens-1 once.

    Raises:
        ConfigError: a stride that would leave tokens out.
    """
    if not 1 <= stride < context:
        raise ConfigError(f"stride is {stride}, needs 1 to {context - 1} (context is {context}).")
    done = 1
    start = 0
    while done < tokens:
        end = min(start + context, tokens)
        yield Window(start, end - start, end - done)
        done = end
        start += stride


def batches(found: Iterator[Window], size: int) -> Iterator[list[Window]]:
    """Neighbouring windows of equal length and scored count, at most `size` together."""
    batch: list[Window] = []
    for window in found:
        same = batch and (batch[0].length, batch[0].scored) == (window.length, window.scored)
        if batch and (not same or len(batch) == size):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def compare(
    load_baseline: Callable[[], Any],
    load_candidates: Mapping[str, Callable[[], Any]],
    text: Text,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    together: bool = True,
    layers: LayerErrors | None = None,
    load_for_layers: Mapping[str, Callable[[], Any]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Comparison]:
    """Score the original and each candidate on `text`; the original runs once.

    Args:
        load_baseline, load_candidates: make the models; each is called once. Candidates go by scheme.
        stride: default half the context.
        batch: windows a forward; default as many as 256 MiB of float32 logits hold.
        together: all models in memory, window by window, with KL. Otherwise one after the other, which
            stores one token id a position and gives no KL.
        layers: collects the error of each layer; only `together`.
        load_for_layers: further candidates that `layers` compares, and that are not scored.
        progress: called with (tokens scored, tokens to score), over all models.
    Raises:
        EvaluationError: the models' vocabularies differ.
        ConfigError: `layers` without `together`.
    """
    if layers is not None and not together:
        raise ConfigError("the error of each layer needs all models in memory together.")
    baseline = load_baseline()
    context = context_of(baseline, context, text)
    stride = stride or max(1, context // 2)
    total = len(text.ids) - 1
    size = batch or batch_size(baseline, context)
    tick = progress or (lambda done, all_: None)
    everything = total * (1 + len(load_candidates))
    plan = list(batches(windows(len(text.ids), context, stride), size))
    first = Score(scored_bytes=text.scored_bytes)
    scores = {name: Score(scored_bytes=text.scored_bytes) for name in load_candidates}
    agree = dict.fromkeys(scores, 0)
    kl = dict.fromkeys(scores, 0.0)
    done = lambda: tick(first.tokens + sum(s.tokens for s in scores.values()), everything)
    if together:
        candidates = {name: make() for name, make in load_candidates.items()}
        extra = {name: make() for name, make in (load_for_layers or {}).items()} if layers is not None else {}
        with nullcontext() if layers is None else layers.attached(baseline, candidates | extra):
            for group in plan:
                logits = _logits(baseline, text, group, first)
                others = {name: _logits(model, text, group, scores[name]) for name, model in candidates.items()}
                for name, other in others.items():
                    _same_vocabulary(_kind(baseline), logits.shape[-1], _kind(candidates[name]), other.shape[-1])
                for a, bs, target in _rows(logits, others, text, group):
                    pa, top_a = _add(first, a, target)
                    for name, b in bs.items():
                        pb, top_b = _add(scores[name], b.to(a.device), target)
                        agree[name] += int((top_a == top_b).sum())
                        each = torch.where(pa == -math.inf, 0.0, pa.exp() * (pa - pb))
                        kl[name] += float(each.sum(dtype=torch.float64))
                done()
        if layers is not None:
            first.seconds -= layers.seconds
    else:
        chosen: list[torch.Tensor] = []
        width = 0
        for group in plan:
            logits = _logits(baseline, text, group, first)
            width = logits.shape[-1]
            for a, _, target in _rows(logits, {}, text, group):
                chosen.append(_add(first, a, target)[1].to("cpu", torch.int32))
            done()
        kind = _kind(baseline)
        del baseline
        for name, make in load_candidates.items():
            candidate = make()
            stored = iter(chosen)
            for group in plan:
                logits = _logits(candidate, text, group, scores[name])
                _same_vocabulary(kind, width, _kind(candidate), logits.shape[-1])
                for b, _, target in _rows(logits, {}, text, group):
                    agree[name] += int((_add(scores[name], b, target)[1].to("cpu", torch.int32) == next(stored)).sum())
                done()
            del candidate
    mean_kl = lambda name: kl[name] / total if together else None
    return {n: Comparison(first, s, agree[n] / total, mean_kl(n), context, stride) for n, s in scores.items()}


def batch_size(model: Any, context: int) -> int:
    """Windows whose float32 logits fit in 256 MiB, 1 to 8."""
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 0) or 1)
    return max(1, min(8, LOGITS_BYTES // (4 * vocabulary * context)))


def fits_together(checkpoint_bytes: int, device_type: str = "cpu", candidates: int = 1) -> bool:
    """Whether a float model and its INT8 forms (each about half) fit in 70 % of the free memory."""
    if device_type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        try:
            fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
            free = int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (1 + 0.5 * candidates) * checkpoint_bytes < 0.7 * free


def checkpoint_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the weight files in a checkpoint folder; 0 where it is not one."""
    folder = Path(path)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) + sum(
        f.stat().st_size for f in folder.glob("*.bin")
    )


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        CheckpointError: it has none that Transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if not tokenizer("a b", add_special_tokens=False)[
            "input_ids"
        ]:  # some classes come up empty without their files
            raise ValueError("its vocabulary is empty")
        return tokenizer
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{os.fspath(path)} has no tokenizer that Transformers can read: {reason}") from error


@torch.inference_mode()
def _logits(model: Any, text: Text, group: list[Window], score: Score) -> torch.Tensor:
    """Logits [B, scored, V] of the positions before each scored token."""
    ids = torch.stack([text.ids[w.start : w.start + w.length] for w in group]).to(model.device)
    began = time.perf_counter()
    out = model(input_ids=ids, use_cache=False).logits
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
    score.seconds += time.perf_counter() - began
    score.model_tokens += ids.numel()
    scored = group[0].scored
    return out[:, -scored - 1 : -1]


def _rows(
    first: torch.Tensor, others: dict[str, torch.Tensor], text: Text, group: list[Window]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]]:
    """Pieces of all logits with their targets, a few hundred positions at a time."""
    for i, w in enumerate(group):
        end = w.start + w.length
        target = text.ids[end - w.scored : end]
        for at in range(0, w.scored, ROWS):
            piece = slice(at, at + ROWS)
            yield first[i, piece], {name: other[i, piece] for name, other in others.items()}, target[piece]


def _add(score: Score, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add [R, V] logits to the score; returns log-probabilities, float32 [R, V], and the most likely ids [R]."""
    logits = logits.float()
    logp = torch.log_softmax(logits, dim=-1)
    score.non_finite += int((~torch.isfinite(logits).all(-1)).sum())
    score.nll -= float(logp.gather(1, target.to(logp.device).unsqueeze(1)).sum(dtype=torch.float64))
    score.tokens += len(target)
    return logp, logits.argmax(-1)


def _kind(model: Any) -> str:
    """Class and model_type, for messages."""
    return f"{type(model).__name__} ({model.config.model_type})"


def _same_vocabulary(baseline: str, first: int, candidate: str, second: int) -> None:
    if first != second:
        raise EvaluationError(
            f"the original, {baseline}, has {first} logits, and the INT8 model, {candidate}, has {second}; needs the"
            " same vocabulary."
        )


def check_pair(original: str, baseline: Any, model: str, candidate: Any) -> None:
    """That two checkpoints are one model, as far as their configurations say.

    Args:
        original, model: their names, for the message.
        baseline, candidate: their configurations.
    Raises:
        EvaluationError: they differ in architecture or size; names both.
    """

    def facts(config: Any) -> dict[str, Any]:
        text = config.get_text_config()
        return {"model_type": config.model_type} | {name: getattr(text, name, None) for name in _SIZES}

    first, second = facts(baseline), facts(candidate)
    for name, value in first.items():
        if second[name] != value:
            raise EvaluationError(
                f"{original} has {name} {value!r} and {model} {second[name]!r}, so they are not the same model; needs"
                " the original of the INT8 model."
            )
