"""Lightning: strategies for its Trainer and for Fabric."""

from gradsync.tools.integrations.lightning.strategies import (
    GradsyncFabricStrategy,
    GradsyncStrategy,
    register_strategies,
)

__all__ = ["GradsyncFabricStrategy", "GradsyncStrategy", "register_strategies"]
