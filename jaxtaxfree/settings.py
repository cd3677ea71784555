"""The settings of a kernel, in dataclasses whose fields say which values make sense.

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    block: int = setting(256, power_of_2=True, least=16)
"""

import dataclasses
import math
import numbers
from typing import Any


def setting(default: float, *, least: int = 0, most: float = math.inf, power_of_2: bool = False) -> Any:
    """A field of a class of `Settings` that is a number.

    Args:
      default: an integer, or a float where others than integers make sense, too.
      least, most: the number is at least and at most so much.
      power_of_2: it is a power of 2.
    """
    return dataclasses.field(
        default=default,
        metadata={"least": least, "most": most, "whole": type(default) is not float, "power": power_of_2},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What `setting` promises of a dataclass's fields is checked when an object is made.

    Raises:
      ValueError: if a value makes no sense.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if field.type is bool and type(value) is not bool:
                self.refuse(field.name, "True or False")
            if not (rule := field.metadata):
                continue
            least, most, whole, power = (rule[name] for name in ("least", "most", "whole", "power"))
            kinds: Any = numbers.Integral if whole else numbers.Real
            fits = isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most
            if not fits or (power and value not in (1 << i for i in range(63))):
                kind = "a power of 2" if power else "an integer" if whole else "a number"
                self.refuse(field.name, f"{kind} {f'from {least} to {most}' if most < math.inf else f'>= {least}'}")

    def refuse(self, name: str, wanted: str) -> None:
        """Raises ValueError for the value of a field."""
        raise ValueError(f"The setting {name} of a config is {wanted}, not {getattr(self, name)!r}.")
