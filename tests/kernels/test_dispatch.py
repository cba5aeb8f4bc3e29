"""Which backend a call gets, what is said of one that cannot be used, and life without the extension."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
import torch
from quant.kernels import BackendUnavailable, available, current, dispatch, use
from quant.kernels.backend import Backend
from quant.kernels.backends import onednn
from quant.kernels.reference_ops import OPS
from torch._subclasses.fake_tensor import FakeTensorMode

NAMES = [*dispatch.ops.LIBRARIES, "onednn", "reference"]


@pytest.fixture
def other() -> str:
    """A usable backend that is not the default."""
    names = [name for name, reason in available().items() if not reason and name != dispatch.default_name()]
    if not names:
        pytest.skip("only the reference can be used here")
    return names[0]


def test_every_backend_is_listed_with_a_reason_or_none() -> None:
    assert list(available()) == NAMES
    assert available()["reference"] == ""
    assert all(isinstance(reason, str) for reason in available().values())


def test_the_call_goes_before_the_scope(other: str) -> None:
    with use(other):
        assert current("reference").name == "reference"


def test_the_scope_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.setattr(dispatch, "_FROM_ENVIRONMENT", "reference")
    with use(other) as backend:
        assert backend is current()
        assert current().name == other


def test_the_environment_goes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_FROM_ENVIRONMENT", "reference")
    assert current().name == "reference"


def test_the_default_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_FROM_ENVIRONMENT", "")
    assert available()[current().name] == ""


def test_scopes_nest_and_end_where_they_began(other: str) -> None:
    before = current().name
    with use("reference"):
        with use(other):
            assert current().name == other
        assert current().name == "reference"
    assert current().name == before


def test_a_scope_ends_with_an_exception_too() -> None:
    before = current().name
    with pytest.raises(KeyError), use("reference"):
        raise KeyError
    assert current().name == before


def test_a_scope_is_of_its_thread_only(other: str) -> None:
    before, seen = current().name, []
    with use("reference" if before != "reference" else other):
        thread = threading.Thread(target=lambda: seen.append(current().name))
        thread.start()
        thread.join()
    assert seen == [before]


def test_eight_threads_each_compute_with_the_backend_they_chose() -> None:
    usable = [name for name, reason in available().items() if not reason]
    barrier, problems = threading.Barrier(8), []
    weight = torch.randint(-127, 128, (40, 70), dtype=torch.int8)
    x = torch.randint(0, 256, (5, 70), dtype=torch.uint8)
    expected = (x.double() @ weight.double().t()).int()

    def work(name: str) -> None:
        try:
            with use(name):
                for _ in range(20):
                    barrier.wait(30)
                    assert current().name == name
                    assert torch.equal(current().linear_u8s8_s32(x, 0, weight, None), expected)
        except BaseException as error:
            barrier.abort()
            problems.append(error)

    threads = [threading.Thread(target=work, args=(usable[i % len(usable)],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_an_unknown_name_is_answered_with_all_names() -> None:
    with pytest.raises(BackendUnavailable, match="no backend is called 'mkl'; there are " + ", ".join(NAMES)):
        current("mkl")
    with pytest.raises(BackendUnavailable, match="no backend is called 'mkl'"), use("mkl"):
        pass


@pytest.mark.usefixtures("own_registries")
def test_a_backend_that_cannot_be_used_is_answered_with_the_reason_and_the_choices() -> None:
    class Absent(Backend):
        name = "absent"

        def why_not(self) -> str:
            return "it is a test"

        def product(self, q_x: torch.Tensor, q_weight: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it cannot be used")

    dispatch.register_backend(Absent())
    with pytest.raises(
        BackendUnavailable, match=r"backend 'absent' cannot be used here: it is a test; usable are .*reference$"
    ):
        current("absent")


def test_a_backend_without_a_product_says_so() -> None:
    class Empty(Backend):
        name = "empty"

    with pytest.raises(NotImplementedError, match="backend 'empty' brings no product"):
        Empty().linear_u8s8_s32(torch.zeros(1, 2, dtype=torch.uint8), 0, torch.zeros(1, 2, dtype=torch.int8), None)


def test_a_new_backend_has_every_operator_from_its_product_alone() -> None:
    class Loops(Backend):
        name = "loops"

        def product(self, q_x: torch.Tensor, q_weight: torch.Tensor) -> torch.Tensor:
            return (q_x.long()[:, None] * q_weight.long()).sum(2).int()

    weight, x = torch.randint(-127, 128, (4, 6), dtype=torch.int8), torch.randn(3, 6)
    arguments = (x, weight, torch.ones(4), None, None, 8, True, False)
    assert torch.equal(Loops().linear_dynamic(*arguments), dispatch.find("reference").linear_dynamic(*arguments))
    missing = [name for name in dispatch.ops.WITH_BACKEND if not hasattr(Loops(), name)]
    assert [name for name in missing if not name.startswith("run_plan")] == []
    assert Loops().operators.keys() == OPS.keys()


def test_a_graph_leaves_the_choice_to_the_machine_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert current().name == ""
    assert current("reference").name == "reference"


def test_a_backend_first_asked_for_while_a_graph_is_made_is_not_lost() -> None:
    if available()["onednn"]:
        pytest.skip(available()["onednn"])
    for answer in (onednn._probe, onednn.saturates):
        expected = answer()
        answer.cache_clear()
        with FakeTensorMode():
            assert answer() == expected


def test_quant_backend_chooses_for_the_process(run_python: Callable[..., str]) -> None:
    code = "from quant.kernels import current; print(current().name)"
    assert run_python(code, QUANT_BACKEND="reference").strip() == "reference"


def test_an_unknown_quant_backend_is_refused_at_the_first_call(run_python: Callable[..., str]) -> None:
    code = """
from quant.kernels import BackendUnavailable, current
try:
    current()
except BackendUnavailable as error:
    print(error)
"""
    assert "no backend is called 'mkl'" in run_python(code, QUANT_BACKEND="mkl")


# Runs every operator, through the dispatch and through torch.ops, and prints a digest of what they give.
EVERYTHING = """
import hashlib, json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from quant.kernels import available, current, dispatch, quantize_weight, quantize, dequantize, requantize, tables
    names = [current().name, current().name]

torch.manual_seed(0)
ops, backend, results = torch.ops.octet, current(), []
x, (weight, scale) = torch.randn(3, 10), quantize_weight(torch.randn(8, 10))
q_x = quantize(x, 0.02, 128)
results += [q_x, dequantize(q_x, 0.02, 128), requantize(q_x.int(), torch.tensor(0.5), 3)]
for run in (backend, None):
    def call(name, *arguments):
        result = getattr(run, name)(*arguments) if run else getattr(ops, name)(*arguments, "")
        results.extend(result if isinstance(result, tuple) else [result])
    call("linear_u8s8_s32", q_x, 128, weight, None)
    call("linear_u8s8_f32", q_x, 128, weight, None, scale)
    call("linear_u8s8_u8", q_x, 128, weight, None, scale, 100, 0, 255)
    call("linear_dynamic", x, weight, scale, None, None, 16, True, True)
    hh, s_hh = quantize_weight(torch.randn(8, 8) / 3)
    call("rnn_layer", x[None], None, torch.zeros(3, 8), None, weight, scale, None, 8, True, hh, s_hh, None, None, None,
         None, "rnn_relu", False)
    packed = tables.pack_table(torch.randn(6, 4), 8)
    call("embedding", packed, torch.tensor([1, 5]), 8, 4)
    # The maximum: FBGEMM fuses the multiply and add of a sum, which rounds once where we round twice.
    call("embedding_bag", packed, torch.tensor([1, 5]), torch.tensor([0, 1]), None, 8, 4, "max", False, -1)
digest = hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in results)).hexdigest()
print(json.dumps({
    "names": names, "available": available(), "digest": digest, "warnings": [str(w.message) for w in caught],
}))
"""


def test_without_the_extension_everything_runs_on_the_reference(run_python: Callable[..., str]) -> None:
    found = json.loads(run_python(EVERYTHING, QUANT_EXTENSION="none"))
    assert found["names"] == ["reference", "reference"]
    assert found["available"]["native"] == "QUANT_EXTENSION=none leaves the compiled kernels out"
    assert found["warnings"] == []  # it was asked for
    compiled = json.loads(run_python(EVERYTHING))
    assert found["digest"] == compiled["digest"]


def test_an_extension_that_is_not_built_is_said_once(run_python: Callable[..., str]) -> None:
    found = json.loads(run_python(EVERYTHING, QUANT_EXTENSION="/nowhere/_octet.so"))
    assert found["names"] == ["reference", "reference"]
    assert len(found["warnings"]) == 1
    assert "slow reference backend" in found["warnings"][0]
    assert "`quant build` builds them" in found["warnings"][0]


def test_an_extension_that_does_not_load_says_how_to_rebuild_it(run_python: Callable[..., str], tmp_path: str) -> None:
    broken = f"{tmp_path}/_octet.so"
    with open(broken, "w") as file:
        file.write("not an object file")
    found = json.loads(run_python(EVERYTHING, QUANT_EXTENSION=broken))
    assert "`quant build --force`" in found["available"]["native"]
    assert len(found["warnings"]) == 1


def test_a_call_goes_straight_to_the_extension_only_where_nobody_chose_a_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_FROM_ENVIRONMENT", "")
    assert dispatch.is_direct() == (dispatch.default_name() in dispatch.ops.LIBRARIES)
    assert not dispatch.is_direct("reference")
    with use("reference"):
        assert not dispatch.is_direct()
    monkeypatch.setattr(dispatch, "_FROM_ENVIRONMENT", "reference")
    assert not dispatch.is_direct()
