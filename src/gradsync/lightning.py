"""Lightning and Fabric on gradsync: after ``import gradsync.lightning`` both know the strategy ``"gradsync"``.

    import gradsync.lightning

    trainer = Trainer(strategy="gradsync")
    fabric = Fabric(strategy="gradsync")

For settings, pass an object: ``Trainer(strategy=GradsyncStrategy(reduction="int8"))``, and to Fabric a
``GradsyncFabricStrategy``. Works with ``lightning`` and with ``pytorch_lightning`` and ``lightning_fabric``.
"""

from gradsync.tools.integrations.lightning import GradsyncFabricStrategy, GradsyncStrategy, register_strategies

__all__ = ["GradsyncFabricStrategy", "GradsyncStrategy"]

register_strategies()
