"""A kernel of an operation as one object, and the choice among the kernels of an operation.

An operation has a tuple of variants. `choose` takes the cheapest one that does not refuse the call, or the one that
`config={"kernel": name}` names. To add a kernel is to write one class and to enter one object into the tuple.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtaxfree.primitive import Lasting, Unsupported, hashable
from jaxtaxfree.settings import Settings

# The setting that names a kernel.
KERNEL = "kernel"


class Variant[Call](abc.ABC):
    """One kernel of an operation.

    Attributes:
      name: what `config={"kernel": name}` says.
      Config: its settings, and no others.
      kernel: what `triton.jit` or `gluon.jit` made.
      scales: whether it takes operands with scales.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Settings]]
    kernel: ClassVar[Any]
    scales: ClassVar[bool] = False

    def refuses(self, call: Call, config: Any) -> list[str]:
        """All reasons for which the kernel cannot take the call."""
        del call, config
        return []

    def check_compiles(self, call: Call, config: Any) -> None:
        """Raises ValueError for settings that the compiler does not take together, though the simulator does."""
        del call, config

    @abc.abstractmethod
    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Any:
        """The configuration for a call.

        Args:
          asked: the settings that a caller makes. `choose` puts them into the configuration; others may depend on them.
        """

    def refuses_by_shape(self, call: Call) -> list[str]:
        """The same of the call's own configuration."""
        return self.refuses(call, self.by_shape(call, {}))

    def cost(self, call: Call, config: Any) -> float:
        """To be compared with that of other variants; infinite where the kernel is not taken unless it is named."""
        del call, config
        return 0

    def slower(self, call: Call, config: Any) -> str | None:
        """Why XLA is known to be faster than this kernel, if it is."""
        del call, config
        return None

    @abc.abstractmethod
    def launch(self, call: Call, config: Any) -> dict[str, Any]:
        """The keywords with which `shmem_call` launches the kernel."""

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        """The operands in the kernel's order, as the configuration wants them."""
        del call, config
        return operands

    def variations(self, call: Call, config: Any) -> list[dict[str, Any]]:
        """What a tuner may change of a configuration, the most promising first.

        Each is a change of some settings, or names another kernel. What makes no sense is left out by the tuner.
        """
        del call, config
        return []


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel and its configuration for a call. Two are equal if they launch alike, whatever the call."""

    variant: Variant[Any]
    config: Any
    call: Any = dataclasses.field(compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What makes the same choice again, whatever the shape."""
        return {KERNEL: self.variant.name, **dataclasses.asdict(self.config)}

    def arrays(self, *operands: Any) -> tuple[Any, ...]:
        """The operands as the kernel takes them."""
        return self.variant.arrays(self.call, self.config, *operands)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords with which `shmem_call` launches the kernel."""
        return self.variant.launch(self.call, self.config)


def choose(operation: str, variants: Sequence[Variant[Any]], call: Any, settings: Mapping[str, Any]) -> Choice:
    """The kernel that takes a call, and its configuration.

    Args:
      operation: its name, for errors.
      variants: its kernels.
      call: what they are asked to take.
      settings: what a caller asks for. What they do not say is chosen by shape.

    Raises:
      Unsupported: if no kernel takes the call, or the one that is named does not, or not with these settings.
      ValueError: if the chosen kernel has no such setting, or it cannot have this value.
    """
    settings = dict(settings)
    name = settings.pop(KERNEL, None)
    if name is not None:
        variant = named(operation, variants, name)
        by_shape = variant.by_shape(call, settings)
    else:
        found = {variant: variant.by_shape(call, settings) for variant in variants}
        refusals = {variant: _refuses(variant, call, config) for variant, config in found.items()}
        able = [variant for variant, reasons in refusals.items() if not reasons]
        if not able:
            raise Unsupported(operation, [f"{each.name}: {why}" for each, whys in refusals.items() for why in whys])
        variant = min(able, key=lambda each: each.cost(call, found[each]))
        by_shape = found[variant]
    check_settings(operation, variants, variant, settings)
    config = dataclasses.replace(by_shape, **settings)
    if reasons := _refuses(variant, call, config):
        raise Unsupported(f"{operation} ({variant.name!r})", reasons)
    return Choice(variant, config, call)


def _refuses(variant: Variant[Any], call: Any, config: Any) -> list[str]:
    """All reasons for which a kernel cannot take a call."""
    if getattr(call, "scaled", False) and not variant.scales:
        return [Lasting("it takes no operands with scales")]
    return variant.refuses(call, config)


def named(operation: str, variants: Sequence[Variant[Any]], name: Any) -> Variant[Any]:
    """The kernel of this name; raises ValueError if the operation has none."""
    for variant in variants:
        if variant.name == name:
            return variant
    known = ", ".join(repr(variant.name) for variant in variants)
    raise ValueError(f"{operation} has no kernel {name!r}: choose one of {known}.")


def check_settings(
    operation: str, variants: Sequence[Variant[Any]], variant: Variant[Any], settings: Mapping[str, Any]
) -> None:
    """Raises ValueError if a kernel has not all of these settings."""
    for name in settings:
        if name not in fields(variant):
            others = [repr(other.name) for other in variants if name in fields(other)]
            have = f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""
            own = ", ".join(fields(variant))
            raise ValueError(
                f"The kernel {variant.name!r} of {operation} has no setting {name!r} (it has {own}){have}. "
                f'Name a kernel in config, such as {{"{KERNEL}": {others[0] if others else repr(variant.name)}}}.'
            )


def fields(variant: Variant[Any]) -> list[str]:
    """The names of a kernel's settings."""
    return [field.name for field in dataclasses.fields(variant.Config)]


def settings_of(operation: str, variants: Sequence[Variant[Any]], config: Any) -> tuple[tuple[str, Any], ...]:
    """The settings that a caller makes, as a parameter of a primitive; none by None.

    Args:
      operation: its name, for errors.
      variants: its kernels.
      config: None, a mapping, or the `Config` of one of the kernels, which names the kernel as well.

    Raises:
      ValueError: if there is no such kernel or setting, or it cannot have this value in any kernel that has it.
      TypeError: if it is something else.
    """
    kinds = {variant.Config: variant for variant in variants}
    if type(config) in kinds:
        return hashable(Choice(kinds[type(config)], config, None).settings)
    if not (config is None or isinstance(config, Mapping)):
        raise TypeError(
            f"{operation} takes as config None, a mapping, or the Config of one of its kernels (of "
            f"{variants[0].Config.__module__}, say), not {config!r}."
        )
    settings = dict(config or {})
    _check_old_spelling(operation, variants, settings)
    others = {name: value for name, value in settings.items() if name != KERNEL}
    if KERNEL in settings:
        candidates = [named(operation, variants, settings[KERNEL])]
        check_settings(operation, variants, candidates[0], others)
    else:
        known = list(dict.fromkeys(name for variant in variants for name in fields(variant)))
        if unknown := [name for name in others if name not in known]:
            raise ValueError(f"{operation} has no setting {unknown[0]!r}: config takes {KERNEL}, {', '.join(known)}.")
        candidates = [variant for variant in variants if others.keys() <= set(fields(variant))]
        if not candidates:
            check_settings(operation, variants, variants[-1], others)
    faults = []
    for variant in candidates:
        try:
            variant.Config(**others)
            break
        except ValueError as fault:
            faults.append(fault)
    else:
        raise faults[-1]
    return hashable(settings)


def _check_old_spelling(operation: str, variants: Sequence[Variant[Any]], settings: Mapping[str, Any]) -> None:
    """Raises ValueError for the two booleans that named a kernel before kernels had names."""
    old = {name: settings[name] for name in ("hopper", "small") if name in settings}
    names = [variant.name for variant in variants]
    if old and {"hopper", "portable"} <= set(names):
        new = ("hopper" if old.get("hopper") else "portable", "hopper_few" if old.get("hopper") else "few")
        raise ValueError(
            f"{operation} names its kernels now: in place of {', '.join(f'{k}={v}' for k, v in old.items())} say "
            f'config={{"{KERNEL}": {new[bool(old.get("small"))]!r}}}.'
        )
