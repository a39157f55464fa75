"""How experts start: from which tensor of a dense detector each of theirs is made.

One table per block (`MoEBlock.starts`) serves the weights of a dense checkpoint (sparse
upcycling, Komatsuzaki et al. 2023, arXiv 2212.05055), the draws of a new detector and
the moments of an optimizer (appendix B.6 there). Routers keep their weights. A shared
expert becomes the FFN, and routed experts add nothing at first (FFNs are copies of it
except for zero second layers), so the block equals the FFN for any gate.

Axes: D model width, H hidden width of the FFN, P parts, E experts = copies x parts, S
hidden units of a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn

from damex.moe import FFNExperts

SHARED = "moe.shared_expert.expert."
ROUTED = "moe.experts."
ROUTER = "moe.router."
DENSE_EXPERT = 0  # acts as the FFN in a dense phase
FLAG = "dense_phase.flag"  # in the state dict of a block
# Hidden axis of the tensors of one expert that have one.
HIDDEN_AXES = {"w1_EDH": 1, "b1_EH": 0, "w2_EHD": 0}


@contextmanager
def fork_rng(seed: int | None = None) -> Iterator[None]:
    """Use a separate random stream, by default seeded from the CPU's, then restore."""
    # torch.manual_seed would also reseed GPUs, now or when CUDA is first used.
    generators = [torch.default_generator, *torch.cuda.default_generators]
    states = [generator.get_state() for generator in generators]
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Start(NamedTuple):
    """Where a tensor of a block comes from: by default, the one of the same name.

    Attributes:
        source: Key of the earlier tensor in a state dict; None if there is none.
        convert: Maps the earlier tensor, the one of the block, and their kind
            ('weight', or a 'first' or 'second' moment; the second is of squared
            gradients) to the new tensor.
    """

    source: str | None
    convert: Callable[[Any, Tensor, str], Tensor] = lambda source, own, kind: source


def copies_of_one(source: Any, own: Tensor, kind: str) -> Tensor:
    """Copy the one expert that a dense phase has trained to all."""
    return source[DENSE_EXPERT].expand_as(source).clone()


def tied_rows(parts: int, source: Any, own: Tensor, kind: str) -> Tensor:
    """Copy the router row of the first part of each copy to all its parts."""
    return own[::parts].repeat_interleave(parts, dim=0)


@dataclass(frozen=True, kw_only=True)
class FFNCut:
    """Converts a tensor of an FFN: cut into parts along its hidden axis, and copied.

    Experts c*P to (c+1)*P - 1 are copy c of the FFN: each part has its share of the
    hidden units and b2 / P, so the outputs of one copy add up to that of the FFN
    (Dynamic-DINO, ICCV 2025, arXiv 2507.17436). If P does not divide H, the later parts
    have one extra hidden unit: its first layer stays as drawn and its second is zero,
    so it is silent at first and can learn.

    Attributes:
        name: Name of the experts' tensor.
        units: The hidden units of the FFN that these experts divide.
        is_muted: Whether the tensor starts at zero, as another bank is the FFN.
    """

    name: str
    units: range
    parts: int = 1
    copies: int = 1
    is_muted: bool = False

    def fits(self, source: Tensor, own: Tensor) -> bool:
        """Whether the result has the shape of the block's tensor."""
        is_alike = source.dim() == own.dim() - 1
        return is_alike and self._expand(source, False).shape == own.shape

    def __call__(self, source: Any, own: Tensor, kind: str) -> Tensor:
        """Cut and copy weights, or a moment."""
        # What starts at zero has no direction yet, but will see gradients as large as
        # the FFN's: without its second moment Adam's first steps would be too long.
        if self.is_muted and kind != "second":
            return torch.zeros_like(own)
        if kind != "weight":  # each part of the second bias sees the whole gradient
            return self._expand(source, kind == "second")
        found = self._expand(source.to(own), False)
        if self.name == "b2_ED":
            # Dynamic-DINO: b2 / k, so that sum_j E_j(x) = FFN(x) over k parts.
            return found / self.parts
        over = len(self.units) % self.parts
        if over and self.name in ("w1_EDH", "b1_EH"):
            for part in range(over, self.parts):  # the extra unit stays as drawn
                found[part :: self.parts, ..., -1] = own[part :: self.parts, ..., -1]
        return found

    def _expand(self, source: Tensor, repeats_last: bool) -> Tensor:
        """Cut and copy; extra units repeat the last one of their part, or are zero."""
        value = source.t() if source.dim() == 2 else source
        axis, pieces = HIDDEN_AXES.get(self.name), [value] * self.parts
        if axis is not None:
            before = (slice(None),) * axis
            value = value[(*before, slice(self.units.start, self.units.stop))]
            pieces = [*value.tensor_split(self.parts, axis)]
            for part, piece in enumerate(pieces):
                if piece.shape != pieces[0].shape:
                    last = piece[(*before, slice(-1, None))]
                    last = last if repeats_last else torch.zeros_like(last)
                    pieces[part] = torch.cat([piece, last], axis)
        return torch.stack(pieces).repeat(self.copies, *[1] * value.dim())


@dataclass(frozen=True, kw_only=True)
class SplitStart:
    """Initialization of fine-grained experts as the parts of one dense FFN.

    A shared expert (DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066) has the first S
    hidden units and the second bias; the others are cut from the rest. The block equals
    the FFN with `TopKGate(k=parts, renormalize=True, weight_scale=parts)`: the parts of
    one copy tie, are chosen together and have weight 1 each. ``hidden_dims`` is the
    FFN's width before the cut, ``parts`` the number of routed pieces.
    """

    parts: int
    hidden_dims: int

    def draw(self, block: Any) -> None:
        """Draw a dense FFN and cut it into the experts of a block, in place."""
        experts: Any = block.moe.experts
        dense = FFNExperts(
            1,
            experts.embed_dims,
            self.hidden_dims,
            activation=experts.activation,
            init_std=experts.init_std,
            output_bias=experts.output_bias,
        ).to(experts.w1_EDH.device)
        rows = {name: tensor[0] for name, tensor in dense.state_dict().items()}
        ffn = {
            key: rows[name].t() if name.startswith("w") else rows[name]
            for name, key in dense_keys(block.state_dict(), "").items()
        }
        load_ffn(block, ffn)


def cut_hidden_dims(hidden_dims: int, *, parts: int, shared: int) -> tuple[int, int]:
    """Hidden widths of the first `shared` parts of an FFN, and of each other part.

    S, and ceil((H - S) / (parts - shared)). Raises ValueError if `parts` is not in
    [1, H] or `shared` not in [0, parts).
    """
    if not 1 <= parts <= hidden_dims:
        raise ValueError(f"parts must lie in [1, H={hidden_dims}], got {parts}")
    if not 0 <= shared < parts:
        raise ValueError(
            f"shared must lie in [0, parts={parts}), as one part or more is routed, "
            f"got {shared}"
        )
    smallest, over = divmod(hidden_dims, parts)  # the first parts are one larger
    width = shared * smallest + min(shared, over)
    return width, -(-(hidden_dims - width) // (parts - shared))


def dense_keys(own: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Map the names of an expert's tensors to the keys of mmcv's FFN.

    ``own`` is the state dict of a block with experts, ``prefix`` that of the block's
    keys.
    """
    names = {"w1_EDH": "0.0.weight", "b1_EH": "0.0.bias"}
    names |= {"w2_EHD": "1.weight", "b2_ED": "1.bias"}
    if any(f"{bank}slope_E1" in own for bank in (ROUTED, SHARED)):
        names["slope_E1"] = "0.1.weight"  # of nn.PReLU
    return {name: f"{prefix}layers.{key}" for name, key in names.items()}


def ffn_starts(block: Any, state: Mapping[str, Any], prefix: str) -> dict[str, Start]:
    """The starts of a block's experts from an FFN in a state dict, by tensor name.

    Empty if the state dict has no FFN, or it does not fit.
    """
    own, moe, split = block.state_dict(), block.moe, block.split
    keys = dense_keys(own, prefix)
    if keys.get("slope_E1") not in state:  # of a ReLU: experts keep their own
        keys.pop("slope_E1", None)
    if not all(key in state for key in keys.values()):
        return {}
    width = state[keys["b1_EH"]].numel()
    if split is not None and width != split.hidden_dims:
        return {}
    cuts = _cuts(block, [*keys], width)
    found = {
        name: Start(keys[cut.name], cut)
        for name, cut in cuts.items()
        if name in own and cut.fits(state[keys[cut.name]], own[name])
    }
    if moe.shared_expert is None or split is not None:
        is_whole = len(found) == len(cuts)  # all together are the FFN
    else:  # the shared expert is the FFN, and the others add nothing to it
        outputs = getattr(moe.experts, "output_names", ())
        zeros = Start(None, lambda source, own, kind: torch.zeros_like(own))
        found = {ROUTED + name: zeros for name in outputs} | found
        shared = [name for name in cuts if name.startswith(SHARED)]
        is_whole = bool(outputs) and all(name in found for name in shared)
    if split is not None and split.parts > 1:  # copies of one part have no ties
        rows = [name for name in own if name.startswith(ROUTER)]
        found |= {name: Start(None, partial(tied_rows, split.parts)) for name in rows}
    return found if is_whole else {}


def _cuts(block: Any, names: Sequence[str], width: int) -> dict[str, FFNCut]:
    """How the tensors of an FFN of a width make those of the banks of a block."""
    moe, split = block.moe, block.split
    parts = 1 if split is None else split.parts
    whole = range(width)
    cut: dict[str, Any] = dict(
        units=whole, parts=parts, copies=moe.num_experts // parts
    )
    if moe.shared_expert is None:
        return {ROUTED + name: FFNCut(name=name, **cut) for name in names}
    shared, muted = whole, getattr(moe.experts, "output_names", ())
    if split is not None:
        dims = moe.shared_expert.expert.hidden_dims
        shared, cut["units"] = whole[:dims], whole[dims:]
        muted = ("b2_ED",)  # the shared expert has all of it
    found = {SHARED + name: FFNCut(name=name, units=shared) for name in names}
    for name in names:
        found[ROUTED + name] = FFNCut(name=name, is_muted=name in muted, **cut)
    return found


@torch.no_grad()
def load_ffn(block: Any, ffn: Mapping[str, Tensor]) -> None:
    """Load an FFN's state dict into the experts of a block, in place, if it fits."""
    own = block.state_dict()
    for name, start in ffn_starts(block, ffn, "").items():
        source = ffn.get(start.source or "")
        own[name].copy_(start.convert(source, own[name], "weight"))


@torch.no_grad()
def copy_draws(block: Any, dense: FFN) -> None:
    """Copy freshly drawn FFN weights to the part of a block that replaces the FFN.

    This is the shared expert, the FFN that fine-grained experts are cut from, or the
    expert of a dense phase. Plain experts keep their draws, as do parts of another
    width or with a custom initializer.
    """
    moe, ffn = block.moe, dense.state_dict()
    if getattr(moe.experts, "init_std", None) is not None:
        return
    if block.split is not None:
        load_ffn(block, ffn)
    elif moe.shared_expert is not None or block.is_dense:
        bank = ROUTED if moe.shared_expert is None else SHARED
        own, units = block.state_dict(), range(dense.feedforward_channels)
        pairs = [
            (FFNCut(name=name, units=units), ffn[key], own[bank + name][:1])
            for name, key in dense_keys(own, "").items()
            if key in ffn
        ]
        if all(cut.fits(source, row) for cut, source, row in pairs):
            for cut, source, row in pairs:
                row.copy_(cut(source, row, "weight"))


class DensePhase(nn.Module):
    """Whether a block is still a dense FFN; a buffer, as checkpoints must store it.

    Attributes:
        is_open: The flag on the host, as reading the buffer would synchronize a GPU.
    """

    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))
        self.is_open = True

    def close(self) -> None:
        """End the dense phase for good."""
        self.flag.fill_(False)
        self.is_open = False

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.is_open = bool(self.flag)


def phase_starts(block: Any, state: Mapping[str, Any], prefix: str) -> dict[str, Start]:
    """The starts of experts after a dense phase, which trained only one of them."""
    if block.dense_phase is not None or not bool(state.get(prefix + FLAG, False)):
        return {}
    return {
        name: Start(prefix + name, copies_of_one)
        for name in block.state_dict()
        if name.startswith(ROUTED) and prefix + name in state
    }


def load_starts(block: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Pre-load hook: convert what a state dict has of another form of this block.

    This is the dense module, or experts with a dense phase for a block without one, and
    vice versa. Tensors that do not fit are left for the loader to report.
    """
    own, starts = block.state_dict(), block.starts(state, prefix)
    converted = {
        prefix + name: start.convert(state.get(start.source or ""), own[name], "weight")
        for name, start in starts.items()
    }
    known = {prefix + name for name in own}
    dense = {start.source for start in starts.values() if start.source} - known
    for key in dense:
        del state[key]
    state.update(converted)
    if dense:
        for name, tensor in own.items():  # missing in a dense checkpoint
            state.setdefault(prefix + name, tensor)
    elif block.dense_phase is None:
        state.pop(prefix + FLAG, None)
    elif any(key.startswith(prefix + ROUTED) for key in state):
        state.setdefault(prefix + FLAG, torch.tensor(False))


def load_closing_norm(
    layer: Any, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Pre-load hook: load an untouched layer's closing norm into the block's own.

    It is the best available start, though not an equal one, as it now precedes the
    experts.
    """
    closing = closing_norm(layer, prefix)
    for key in [key for key in state if key.startswith(closing)]:
        name = key.removeprefix(closing)
        state.setdefault(f"{prefix}ffn.norm.{name}", state.pop(key))


def closing_norm(layer: Any, prefix: str) -> str:
    """Return the key prefix of the closing norm of an untouched layer."""
    return f"{prefix}norms.{len(layer.norms) - 1}."
