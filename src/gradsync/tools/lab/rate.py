"""The rate of a link: ``400mbit``, ``1gbit``, ``50MB/s``."""

import re
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError

__all__ = ["Rate"]

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# "Mb/s" and "mbps" mean bits to some and bytes to others, so neither is taken.
BITS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", re.IGNORECASE)
BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)B/s")
SLOWEST, FASTEST = 8_000, 10**12


@dataclass(frozen=True, kw_only=True, order=True)
class Rate:
    """Bits a second, in powers of ten as on every network card."""

    bits_per_second: int

    def __post_init__(self) -> None:
        if not SLOWEST <= self.bits_per_second <= FASTEST:
            raise ConfigurationError(
                f"a link's rate must lie between 8kbit and 1000gbit, got {self.bits_per_second} bits a second"
            )

    @classmethod
    def parse(cls, text: str) -> "Rate":
        """Bits as in ``400mbit``, ``2.5gbit``, ``10Gbit/s``; bytes as in ``50MB/s``."""
        for pattern, bits in ((BITS, 1), (BYTES, 8)):
            match = pattern.fullmatch(text.strip())
            if match is not None:
                number, prefix = match.groups()
                return cls(bits_per_second=round(float(number) * bits * PREFIXES[prefix.lower()]))
        raise ConfigurationError(
            f"a link's rate is written like 800kbit, 400mbit, 2.5gbit or 50MB/s, got {text!r}. A b alone is refused: "
            "it means bits to some and bytes to others"
        )

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def __str__(self) -> str:
        """What :meth:`parse` and ``tc`` read: ``2.5gbit``."""
        for prefix in ("t", "g", "m", "k"):
            if self.bits_per_second >= PREFIXES[prefix] and prefix != "t":
                number = f"{self.bits_per_second / PREFIXES[prefix]:.6f}".rstrip("0").rstrip(".")
                return f"{number}{prefix}bit"
        return f"{self.bits_per_second}bit"
