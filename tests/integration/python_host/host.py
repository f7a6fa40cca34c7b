# SPDX-License-Identifier: MIT
"""Trains with checkpoints in C++ inside this Python process, beside Python's own features.

    host.py LIBRARY torch|library

The second argument says which comes first: `import torch`, or loading and using the library. Every test
trains in C++ before and after it, and compares that with plain by bits.
"""

import concurrent.futures
import ctypes
import sys
import unittest
import warnings

path, first = sys.argv[1:3]


def load_library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(path)
    for name in ("train", "begin", "finish", "recomputed"):
        getattr(loaded, f"remat_host_{name}").restype = ctypes.c_int64
    loaded.remat_host_error.restype = ctypes.c_char_p
    return loaded


def expect_none_differs(count: int) -> None:
    if count != 0:
        raise AssertionError(f"{count} tensors differ from plain; {library.remat_host_error().decode()}")


if first == "library":
    library = load_library()
    expect_none_differs(library.remat_host_train(3))
    library.remat_host_begin()

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

if first == "torch":
    library = load_library()
    library.remat_host_begin()


def train() -> None:
    """Trains in C++ and compares with plain; the state of this thread stays."""
    before = library.remat_host_recomputed()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        expect_none_differs(library.remat_host_train(2))
    if library.remat_host_recomputed() == before:
        raise AssertionError("nothing was recomputed")


def block(x, weight, is_checkpointed=True, dropout=0.25):
    """Runs a region of the library on Python's tensors."""
    return torch.ops.remat_host.block(x, weight, dropout, is_checkpointed)


def leaves():
    torch.manual_seed(3)
    return torch.randn(5, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def results_of(function, **options):
    """Runs function(x, weight): its result and its gradients, from one seed."""
    x, weight = leaves()
    torch.manual_seed(7)
    y = function(x, weight)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight], **options)]


class Square(torch.autograd.Function):
    """A Function whose backward trains in C++ and uses a region itself."""

    backward_count = 0

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        Square.backward_count += 1
        train()
        (x,) = context.saved_tensors
        with torch.enable_grad():
            results = [results_of(lambda a, b: block(a, b, is_on)) for is_on in (False, True)]
        if not all(map(torch.equal, *results)):
            raise AssertionError("a region inside a Function's backward differs from plain")
        return 2 * x * gradient


class PythonHost(unittest.TestCase):
    def setUp(self):
        train()

    def tearDown(self):
        train()

    def assert_same(self, left, right):
        self.assertEqual(len(left), len(right))
        for one, other in zip(left, right):
            self.assertTrue(torch.equal(one, other))

    def assert_checkpointed_is_plain(self, function):
        """Calls function(x, weight, is_checkpointed) both ways."""
        plain = results_of(lambda x, weight: function(x, weight, False))
        before = library.remat_host_recomputed()
        self.assert_same(plain, results_of(lambda x, weight: function(x, weight, True)))
        self.assertGreater(library.remat_host_recomputed(), before)

    def test_region(self):
        """Python's tensors get the gradients of plain through a region."""
        self.assert_checkpointed_is_plain(lambda x, weight, is_on: block(x.sin(), weight, is_on).exp())

    def test_python_checkpoint(self):
        """Python's own checkpoint works, both kinds, also around a region."""
        for use_reentrant in (True, False):
            for is_on in (False, True):
                with self.subTest(use_reentrant=use_reentrant, is_on=is_on):
                    calls = []

                    def function(x, weight):
                        calls.append(x)
                        if use_reentrant:  # the other kind may end its second call anywhere, by an exception
                            train()
                        return block(x.cos(), weight, is_on).tanh()

                    def checkpointed(x, weight):
                        return checkpoint(function, x, weight, use_reentrant=use_reentrant)

                    def backward(run):
                        x, weight = leaves()
                        torch.manual_seed(7)
                        y = run(x, weight)
                        y.square().sum().backward()
                        return [y.detach(), x.grad, weight.grad]

                    plain = backward(lambda x, weight: block(x.cos(), weight, False).tanh())
                    self.assert_same(plain, backward(checkpointed))
                    self.assertEqual(len(calls), 2)

    def test_saved_tensor_hooks(self):
        """Hooks see what plain code saves, C++ code too, and not what a region drops."""
        counts = {"pack": 0, "unpack": 0}

        def pack(tensor):
            counts["pack"] += 1
            return tensor.clone()

        def unpack(tensor):
            counts["unpack"] += 1
            return tensor

        def counted(function):
            counts.update(pack=0, unpack=0)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                results = results_of(function)
            return dict(counts), results

        own, _ = counted(lambda x, weight: (x.exp() @ weight).sin())
        self.assertGreater(own["pack"], 0)
        self.assertEqual(own["pack"], own["unpack"])
        plain, expected = counted(lambda x, weight: (block(x, weight, False).exp() @ weight).sin())
        self.assertGreater(plain["pack"], own["pack"])
        region, found = counted(lambda x, weight: (block(x, weight, True).exp() @ weight).sin())
        self.assertEqual(region, own)
        self.assert_same(expected, found)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            before = counts["pack"]
            train()
        self.assertGreater(counts["pack"], before)

    def test_save_on_cpu(self):
        """save_on_cpu gives the gradients of plain, around a region too."""
        def function(x, weight, is_on):
            with torch.autograd.graph.save_on_cpu():
                train()
                return block(x.sin(), weight, is_on).exp()

        self.assert_checkpointed_is_plain(function)

    def test_function(self):
        """A Function's backward may train in C++, and open regions."""
        Square.backward_count = 0
        self.assert_checkpointed_is_plain(lambda x, weight, is_on: Square.apply(block(x, weight, is_on)))
        x = torch.tensor([1.0, 3.0], requires_grad=True)
        Square.apply(x).sum().backward()
        self.assertEqual(x.grad.tolist(), [2.0, 6.0])
        self.assertEqual(Square.backward_count, 3)

    def test_anomaly_mode(self):
        """Anomaly mode finds what it finds in plain, inside a region too."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode warns that it is slow, and of what it finds
            with torch.autograd.detect_anomaly():
                train()
                self.assert_checkpointed_is_plain(block)
                for is_on in (False, True):
                    x, weight = leaves()
                    y = block((x - x).sqrt() * 0, weight, is_on, dropout=0.0)  # the root of zero
                    with self.assertRaisesRegex(RuntimeError, "'SqrtBackward0' returned nan values"):
                        y.sum().backward()

    def test_tensor_hooks(self):
        """Hooks on tensors fire as often as in plain."""
        def counted(is_on):
            calls = []
            x, weight = leaves()
            hidden = x.sin()
            for tensor in (x, weight, hidden):
                tensor.register_hook(lambda gradient: calls.append(gradient))
            torch.manual_seed(7)
            block(hidden, weight, is_on).sum().backward()
            return calls

        self.assert_same(counted(False), counted(True))

    def test_double_backward(self):
        """A gradient of a gradient is that of plain."""
        def function(x, weight, is_on):
            y = block(x.sin(), weight, is_on)
            return y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]

        self.assert_checkpointed_is_plain(function)

    def test_change(self):
        """A weight that changes before backward is an error in Python, and the next step is right."""
        x, weight = leaves()
        y = block(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with self.assertRaisesRegex(RuntimeError, r"^\[remat\.recompute\.\w*changed\]"):
            y.sum().backward()
        self.assert_checkpointed_is_plain(block)

    def test_autocast(self):
        """Autocast of Python reaches into a region."""
        def function(x, weight, is_on):
            with torch.autocast("cpu", torch.bfloat16):
                return block(x, weight, is_on)

        self.assert_checkpointed_is_plain(function)

    def test_gradcheck(self):
        """Gradients and their gradients are those of finite differences."""
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves()]
        self.assertTrue(torch.autograd.gradgradcheck(lambda x, weight: block(x, weight, dropout=0.0), doubles))

    def test_function_transforms(self):
        """torch.func's gradients and forward mode are those of plain."""
        x, weight = (leaf.detach() for leaf in leaves())

        def results(is_on):
            def function(a):
                return block(a, weight, is_on, dropout=0.0)

            return [torch.func.grad(lambda a: function(a).sum())(x), torch.func.jacrev(function)(x),
                    torch.func.jvp(function, (x,), (x,))[1]]

        self.assert_same(results(False), results(True))

    def test_threads(self):
        """Threads of Python run regions and backward at once."""
        def gradients(is_on):
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(5, 4, generator=generator).requires_grad_()
            weight = torch.randn(4, 4, generator=generator).requires_grad_()
            for _ in range(20):
                y = block(x.sin(), weight, is_on, dropout=0.0)
                found = torch.autograd.grad(y.sum(), [x, weight])
            return found

        expected = gradients(False)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for found in pool.map(gradients, [True, True, False, True]):
                self.assert_same(expected, found)


if __name__ == "__main__":
    # The graph was made before Python's engine ran, or was there at all.
    torch.ones(1, requires_grad=True).sum().backward()
    expect_none_differs(library.remat_host_finish())
    unittest.main(argv=sys.argv[:1])
