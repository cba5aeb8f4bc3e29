"""Products in AMX's tiles: exact on emulated tiles everywhere, and on the CPU's where it has them (`QUANT_ISA=amx`)."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from quant.kernels import build

from .test_core import link

SOURCE = Path(__file__).with_name("core_program") / "amx_products.cpp"


@pytest.fixture(scope="module", params=["plain", "avx512vnni"])
def program(request: pytest.FixtureRequest, core_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the vectors that requantise: plain ones anywhere, and those beside a CPU's own tiles."""
    if platform.system() != "Linux":
        pytest.skip("the pages around the activations are guarded by Linux's mprotect")
    flags: list[str] = []
    if request.param != "plain":
        [vectors] = [one for one in build.all_instruction_sets() if one.name == request.param]
        if not vectors.needs <= set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()):
            pytest.skip(f"this CPU has no {request.param}")
        flags = [*vectors.flags, *build.EXACT_FLAGS]
    return link(SOURCE, [core_library], tmp_path_factory.mktemp("amx") / "amx_products", flags)


def test_products_in_emulated_tiles_are_exact_and_read_no_byte_too_many(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    tiled, across, within = (int(done.stdout.split()[i]) for i in (2, 7, 12))
    assert min(tiled - 150, across, within) > 50, done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unconfigured", "#UD: this thread has no configuration (tile 4)"),
        ("released", "#UD: this thread has no configuration (tile 0)"),
        ("too large", "#GP: larger than a tile (tile 0)"),
        ("depth", "#UD: depth of A and B (tile 0)"),
    ],
)
def test_emulated_tiles_refuse_what_the_cpu_refuses(program: Path, name: str, message: str) -> None:
    done = subprocess.run([program, name], capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert message in done.stderr


# Prints the set in use; ends with an error where a kernel or a whole model gives other bytes than the reference.
COMPARE = """
import torch, quant
from quant.kernels import dispatch, narrow, quantize_weight
from torch import nn

g = torch.Generator().manual_seed(0)
number = lambda low, high: int(torch.randint(low, high + 1, (), generator=g))
native, reference = dispatch.find("native"), dispatch.find("reference")

def same(operator, *arguments):
    one, other = getattr(native, operator)(*arguments), getattr(reference, operator)(*arguments)
    for a, b in zip(*((one, other) if isinstance(one, tuple) else ((one,), (other,)))):
        assert torch.equal(a, b), (operator, [getattr(x, "shape", x) for x in arguments])

small = [(number(1, 40), number(1, 400), number(1, 200)) for _ in range(60)]
large = [(number(65, 300), number(100, 600), number(100, 400)) for _ in range(4)]
in_parts = [(140, 700, 801)]  # of a weight that is not read again for each 64 rows
for m, k, n in small + large + in_parts:
    x = torch.randint(0, 256, (m, k), dtype=torch.uint8, generator=g)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=g)
    bias = torch.randint(-999, 999, (n,), dtype=torch.int32, generator=g)
    multiplier = torch.rand(n, generator=g) / 5000
    same("linear_u8s8_s32", x, 7, weight, bias)
    same("linear_u8s8_f32", x, 7, weight, bias, multiplier)
    same("linear_u8s8_u8", x, 7, weight, bias, multiplier, 9, 0, 255)
    real = torch.randn(m, k, generator=g)
    q, scale = quantize_weight(torch.randn(n, k, generator=g))
    for bits in (8, 16):
        same("linear_dynamic", real, q, scale, None, None, bits, True, False)
# Narrow weights, of one scale and by group, on both sides of the rows from which tiles take them.
for m, groups, n in ((20, 4, 70), (32, 1, 64), (33, 9, 17), (47, 2, 200), (90, 5, 65)):
    for bits in (4, 3, 2):
        for size in (None, 32, 64, 128):
            for symmetric in (True, False) if size else (True,):
                weight = torch.randn(n, groups * (size or 32), generator=g)
                real = torch.randn(m, weight.shape[1], generator=g)
                q, scale = narrow.quantize(weight, bits, size, symmetric=symmetric)
                same("linear_dynamic", real, q, scale, torch.randn(n, generator=g), None, number(1, 2) * 8, True, False)
convolutions = (
    *(((2, 64, 9, 11), 1, 1), ((1, 48, 14, 14), 3, 1), ((1, 32, 12, 12), 3, 2), ((1, 3, 30, 30), 7, 1)),
    *(((1, 64, 30, 28), 3, 1), ((2, 256, 28, 28), 1, 1), ((1, 3, 112, 112), 7, 1)),
    *(((2, 24, 56, 50), 3, 1), ((3, 256, 14, 14), 3, 1)),
)
for shape, kernel, groups in convolutions:
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g).contiguous(memory_format=torch.channels_last)
    weight = torch.randint(-128, 128, (80, shape[1] // groups, kernel, kernel), dtype=torch.int8, generator=g)
    pad = [kernel // 2] * 2
    for stride, dilation in ((1, 1), (2, 1), (1, 2)):
        by = [[stride] * 2, [p * dilation for p in pad], [dilation] * 2, groups]
        same("conv_u8s8_u8", x, 3, weight, None, *by, torch.rand(80, generator=g) / 9000, 8, 0, 255)
    same("conv_u8s8_s32", x, 3, weight, None, [2, 2], pad, [1, 1], groups)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.body, self.after = nn.Conv2d(3, 64, 3, 2, 1), nn.Conv2d(64, 64, 3, 1, 1), nn.Conv2d(64, 96, 1)
        self.deep, self.head = nn.Conv2d(96, 96, 3, 1, 1, groups=96), nn.Linear(96, 10)

    def forward(self, x):
        x = self.before(x).relu()
        x = self.deep(self.after(x + self.body(x)).relu()).relu()
        return self.head(x.mean((2, 3)))

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 40))
for model, x in ((Block().eval(), torch.randn(2, 3, 96, 88)), (encoder, torch.randn(8, 90, 96))):
    by_native, by_reference = (
        quant.quantize_static(model, [x], backend=name, progress=False)(x) for name in ("native", "reference")
    )
    assert torch.equal(by_native, by_reference)
print(torch.ops.octet_native.isa(), native.route(torch.zeros(4, 256, dtype=torch.int8)), native.route(q), sep="; ")
"""


# Prints the bits of recurrent layers of 16 samples, whose gates no reference computes to the bit.
RECURRENT = """
import hashlib, torch, quant
from torch import nn

torch.manual_seed(0)
digest = hashlib.sha256()
for model in (nn.LSTM(77, 130, 2), nn.GRU(77, 130, bidirectional=True), nn.LSTM(400, 350)):
    x = torch.randn(9, 16, model.input_size)
    for q in (quant.quantize_dynamic(model), quant.quantize_static(model, [x], progress=False)):
        y, states = q(x)
        for tensor in (y, *(states if isinstance(states, tuple) else (states,))):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
print(torch.ops.octet_native.isa(), digest.hexdigest())
"""


@pytest.fixture(params=["amx-emulated", "amx"])
def isa(request: pytest.FixtureRequest, run_python: Callable[..., str], extension: None) -> str:
    """Emulated tiles, and the CPU's, whose skip says why they are not used."""
    name: str = request.param
    if name not in [one.name for one in build.instruction_sets(build.host_arch())]:
        pytest.skip(f"{name} is of another architecture")
    code = "from quant.kernels import ops\nimport torch\nassert not ops.extension_problem()\n"
    refused = run_python(f"{code}print(torch.ops.octet_native.isa_refusal())", QUANT_ISA=name).strip()
    if refused:
        assert name == "amx"
        pytest.skip(refused)
    return name


def test_layers_and_whole_models_give_the_bytes_of_the_reference(isa: str, run_python: Callable[..., str]) -> None:
    tiles = {"amx-emulated": "emulated tiles", "amx": "tiles"}[isa]
    assert run_python(COMPARE, QUANT_ISA=isa).strip().split("; ") == [isa, tiles, f"unpacked, {tiles}"]


def test_recurrent_layers_give_the_bits_of_plain_loops(isa: str, run_python: Callable[..., str]) -> None:
    (used, bits), (_, plain) = (run_python(RECURRENT, QUANT_ISA=name).split() for name in (isa, "portable"))
    assert (used, bits) == (isa, plain)


def test_a_set_that_is_refused_says_why(run_python: Callable[..., str], extension: None) -> None:
    code = "import torch\nfrom quant.cli import doctor\nprint(doctor.as_text(doctor.examine()))"
    said = run_python(code, QUANT_ISA="amx" if build.host_arch() == "x86_64" else "amx-emulated")
    used = next(line for line in said.splitlines() if line.startswith("ISA")).split()[-1]
    assert ("refused" in said) == (not used.startswith("amx"))
    assert "refused" not in run_python(code, QUANT_ISA="amx-emulated")
    said = run_python(code)  # without a request, of the tiles that this CPU has
    assert (
        "refused" not in said or next(line for line in said.splitlines() if line.startswith("ISA")).split()[1] == "amx,"
    )
