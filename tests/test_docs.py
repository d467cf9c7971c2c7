"""Every block of Python in README and docs runs, and what pages link to and name exists.

A block is one of three. A *script* (``python``, with its file's name in the first line) runs as it stands. A *fragment*
(``py``) and what a *diff* leads to run between what their page says in words: see ``AROUND``. Two stand elsewhere: the
script of docs/mpi.md runs under mpirun in test_mpi, and the one of docs/lab.md, which needs root, in test_lab.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, Block, blocks
from tests.scripts import run_scripts
from tests.torch_ddp_suite import EXPECTED

# What `gradsync launch` writes is compared with its pages in tests/tools/test_clusters.py.
LANGUAGES = {"", "bash", "diff", "py", "python", "sh", "yaml"}
UNDER_MPIRUN = "mpi.md"

IMPORTS = """
import signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
import gradsync
from gradsync import *
from gradsync.accelerator import DistributedDataParallelKwargs
"""
WRAPPED = """
dist.init_process_group("gloo")
group = dist.group.WORLD
model = DistributedDataParallel(nn.Linear(8, 8))
"""
PLAIN = """
dist.init_process_group("gloo")
group = dist.group.WORLD
model = nn.Linear(64, 64)
"""
# A rank that ends while another one still connects to it fails that one's set-up, as Gloo goes: all wait for all.
ENDED = """
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Around:
    """What has to stand before a fragment for it to run, and what shows after it that it does what it says."""

    before: str = WRAPPED
    after: str = ""


# By page and a piece of the fragment; what is not here runs with a wrapped model before it, and nothing after it.
AROUND = {
    ("README.md", "from gradsync import DistributedDataParallel"): Around(""),
    ("README.md", "accelerator.prepare("): Around(""),
    ("add-a-communicator.md", "class MyCommunicator"): Around(
        "from gradsync.communicator import BaseCommunicator\nrank, world_size = 0, 1",
        "assert MyCommunicator().rank == 0",
    ),
    ("add-a-reduction.md", "reduction=MyReduction()"): Around(
        PLAIN
        + """
from gradsync.reduction import Mean
class MyReduction(Mean): pass
"""
    ),
    ("add-a-reduction.md", "def start"): Around(
        """
from gradsync.reduction import Mean
dist.init_process_group("gloo")
def squeeze(values): return values.double()
def expand_into(values, small): values.copy_(small)
""",
        """
class Squeezed(Mean):
    carries_tail = False
    start = start
model = DistributedDataParallel(nn.Linear(1, 1, bias=False), reduction=Squeezed())
model(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
assert model.module.weight.grad.item() == 0.5
""",
    ),
    ("elastic.md", "accelerator.elastic.attempts("): Around(
        """
import functools, logging
from tests.roll_call import RollCall, join_roll_call
dist.init_process_group("gloo")
call = RollCall() if dist.get_rank() == 0 else None
ports = [call and call.port]
dist.broadcast_object_list(ports)
dist.destroy_process_group()
# Whoever has no torchft is to run this, too.
Elastic = functools.partial(Elastic, join=join_roll_call(ports[0]))
logging.getLogger("gradsync").setLevel(logging.ERROR)
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
loss_function = nn.functional.mse_loss
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4, shuffle=True)
""",
        """
assert accelerator.elastic.step == 1000 and accelerator.num_processes == 2
accelerator.elastic.close()
""",
    ),
    ("coming-from-accelerate.md", "from gradsync.utils import"): Around(""),
    ("coming-from-ddp.md", "from gradsync import"): Around(""),
    ("coming-from-deepspeed.md", "accelerator.prepare("): Around(
        """
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
loss_function = nn.functional.mse_loss
before = model.weight.detach().clone()
""",
        """
optimizer.flush()
assert not torch.equal(accelerator.unwrap_model(model).weight, before)
accelerator.end_training()
""",
    ),
    ("lightning.md", "from lightning.fabric"): Around(
        """
import logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
loss_function = nn.functional.mse_loss
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
before = model.weight.detach().clone()
""",
        """
assert isinstance(model._forward_module, DistributedDataParallel)
assert not torch.equal(model.module.weight, before)
""",
    ),
    ("lightning.md", "import GradsyncStrategy"): Around(
        """
import logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from lightning import Trainer
""",
        "assert trainer.strategy.world_size == 2",
    ),
    ("transformers.md", "on_bad_step="): Around(
        """
import warnings
warnings.simplefilter("ignore")
from transformers import Trainer, TrainingArguments
class Net(nn.Linear):
    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(super().forward(x), labels)}
data = [{"x": x, "labels": x.sum()[None]} for x in torch.randn(64, 8)]
quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
arguments = TrainingArguments(output_dir=".", use_cpu=True, max_steps=2, **quiet)
trainer = Trainer(Net(8, 1), arguments, train_dataset=data)
""",
        """
trainer.train()
assert isinstance(trainer.model_wrapped, DistributedDataParallel)
""",
    ),
    # The whole is what the examples do, on a cluster: see tests/tools/integrations/test_ray.py.
    ("ray.md", "GradsyncConfig("): Around(
        """
import warnings
warnings.simplefilter("ignore")
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
""",
        "assert trainer.backend_config.options == {'on_bad_step': 'skip'} and callable(train)",
    ),
    ("compression.md", "ErrorFeedback(LowRank(4))"): Around(PLAIN),
    ("debug-a-hang.md", "signal.SIGUSR2"): Around(after="signal.raise_signal(signal.SIGUSR2)"),
    ("debug-a-hang.md", "timeout=timedelta"): Around("", "assert dist.get_world_size() == 2"),
    ("debug-a-hang.md", "train_one_step()"): Around(
        WRAPPED
        + """
def train_one_step():
    model(torch.ones(1, 8)).sum().backward()
    raise gradsync.PeerFailedError("of a rank that is not there")
""",
        "assert model.module.weight.grad is None",
    ),
    ("local-steps.md", "local.synchronize()"): Around(
        """
dist.init_process_group("gloo")
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
local = LocalSteps(model, optimizer, every=4)
model(torch.randn(2, 8)).sum().backward()
optimizer.step()
""",
        "assert set(state) == {'model', 'optimizer', 'local'}\nlocal.finish()",
    ),
    ("sharded-optimizer.md", "dcp.save("): Around(
        WRAPPED
        + """
from pathlib import Path
folder = Path(__file__).with_suffix("")
optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
def one_step():
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
one_step()
""",
        """
before = model.module.weight.detach().clone()
one_step()
expected = model.module.weight.detach().clone()
dcp.load(weights, checkpoint_id=folder)
optimizer.load_sharded(folder)
one_step()
assert not torch.equal(before, expected) and torch.equal(model.module.weight, expected)
""",
    ),
    ("transports.md", "RoundRobinCommunicator.over"): Around(PLAIN),
}


def around(block: Block) -> Around:
    found = [around for (page, piece), around in AROUND.items() if page == block.page and piece in block.code]
    assert len(found) < 2, f"{block.where} has more than one entry in AROUND"
    return found[0] if found else Around()


def programs() -> dict[str, str]:
    """By where they stand, all blocks of Python with what they need around them."""
    written = {block.where: block.code for block in blocks("python")}
    for block in blocks("py", "diff"):
        if block.page != UNDER_MPIRUN:
            code = block.after_change if block.language == "diff" else block.code
            written[block.where] = "\n".join([IMPORTS, around(block).before, code, around(block).after, ENDED])
    return written


@pytest.mark.program
@pytest.mark.timeout(240)
def test_every_block_of_python_runs_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one test: they share the processes that run them. Over Gloo, whatever devices there are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    paths: dict[str, Path] = {}
    for where, code in programs().items():
        paths[where] = tmp_path / f"{len(paths)}.py"
        paths[where].write_text(code)
    results = run_scripts(list(paths.values()), ranks=2, folder=tmp_path)
    assert len(results) >= 30
    failed = [f"{where}: {results[path].error}" for where, path in paths.items() if results[path].error is not None]
    assert not failed, "\n".join(failed)


def test_every_python_block_is_a_script_with_a_name() -> None:
    scripts = blocks("python")
    assert [block.where for block in scripts if block.script is None] == []
    names = [block.script for block in scripts]
    assert len(set(names)) == len(names), "two scripts of one name: a command could mean either"


def test_every_fragment_says_what_it_needs_and_nothing_else_does() -> None:
    fragments = blocks("py", "diff")
    unused = [key for key in AROUND if not any(key[0] == block.page and key[1] in block.code for block in fragments)]
    assert unused == []
    assert [block.page for block in fragments if block.script is not None] == [UNDER_MPIRUN]


def test_blocks_are_of_languages_that_a_test_knows() -> None:
    assert {block.where: block.language for block in blocks() if block.language not in LANGUAGES} == {}
    # A block without a language is a drawing or an output: nothing in it is to be run.
    plain = [block for block in blocks("") if re.search(r"^(?:from|import) \w+|^gradsync ", block.code, re.MULTILINE)]
    assert [block.where for block in plain] == []


def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(
            r"\bmake ([a-z][a-z-]*)\b", "\n".join(re.findall(r"`[^`]+`|^make .*$", page.read_text(), re.MULTILINE))
        ):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_variable_is_explained() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"\bGRADSYNC_[A-Z_]+\b", sources))
    assert read == set(re.findall(r"^\| `(GRADSYNC_[A-Z_]+)`", page, re.MULTILINE))


def test_every_test_of_torch_that_fails_is_explained() -> None:
    page = (ROOT / "docs" / "torch-tests.md").read_text()
    assert [name for name, reason in EXPECTED.items() if f"`{name}`" not in page or reason not in page] == []
