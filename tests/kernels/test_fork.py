"""A process that forks: no lock of other threads stops a child, nor do threads that it has left in its parent."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is missing")

SETUP = """
import os, sys, threading, time, warnings
import torch

warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
torch.set_num_threads(1)
sys.setswitchinterval(1e-4)

def forked(work):
    '''Whether work() ends in a child, and is true.'''
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 1)
    for _ in range(6000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False
"""

CACHES = """
from quant.kernels import current
native, backend = torch.ops.octet_native, current()
x, text = torch.ones(1, 4, dtype=torch.uint8), "octet-plan 1\\ninputs %0\\n%9 = same x=%0\\noutputs %9"

def sum_of(weight):
    return int(backend.linear_u8s8_s32(x, 0, weight, None))

def new_weight(value=1):
    return torch.full((1, 4), value, dtype=torch.int8)

# While a weight is added all are looked through, so that the lock is held most of the time.
kept = [new_weight() for _ in range(10_000)]
for weight in kept:
    sum_of(weight)
done = False

def pack():
    while not done:
        sum_of(new_weight())

def work_in_child():
    number = native.keep_text([], text, "native")
    return torch.equal(native.run_text([x], number)[0], x) and sum_of(new_weight(3)) == 12

thread = threading.Thread(target=pack)
thread.start()
print(all(forked(work_in_child) for _ in range(10)))
done = True
thread.join()
"""

LOCK = """
from quant.kernels.at_fork import forked_lock
lock, held = forked_lock(), threading.Event()

def hold():
    with lock:
        held.set()
        time.sleep(0.3)

thread = threading.Thread(target=hold)
thread.start()
held.wait()
print(forked(lambda: lock.acquire(timeout=5)) and lock.acquire(timeout=5))
thread.join()
"""

SHARED = """
from quant.kernels import current
backend, x = current(), torch.ones(512, 1024, dtype=torch.uint8)
weight = torch.ones(512, 1024, dtype=torch.int8)

def product():
    return int(backend.linear_u8s8_s32(x, 0, weight, None).sum()) == 512 * 512 * 1024

def total():
    return int((x + 1).sum()) == 2 * 512 * 1024

def work_on_two():
    return torch.get_num_threads() == 2 and total() and product()

torch.set_num_threads(2)
for share in (total, product):
    print(share(), forked(work_on_two), work_on_two(), forked(lambda: forked(work_on_two)), work_on_two())

torch.set_num_threads(1)
answers = []
def other_thread():
    torch.set_num_threads(2)
    answers.extend([work_on_two(), forked(work_on_two), work_on_two()])
thread = threading.Thread(target=other_thread)
thread.start()
thread.join()
print(*answers)
"""


def test_weights_that_another_thread_packs_do_not_stop_a_child(extension: None, run_python: Callable[..., str]) -> None:
    assert run_python(SETUP + CACHES).strip() == "True"


def test_a_lock_that_another_thread_holds_is_free_in_a_child(run_python: Callable[..., str]) -> None:
    assert run_python(SETUP + LOCK).strip() == "True"


def test_a_thread_that_shared_work_shares_it_in_a_child(extension: None, run_python: Callable[..., str]) -> None:
    """Which would wait there for the threads of its parent: those of torch's operators first, then those of ours."""
    assert run_python(SETUP + SHARED).split() == ["True"] * 13
