"""The same steps and answers as `particle.py`, in C (steps.c, answers.c, cosine.c), for float32 on a CPU.

A step is some sixty operations on tensors of a few kilobytes: torch spends more time on calling them, and on
fetching what has left the cache between two of them, than on the numbers. C takes them one episode after
another in the cache of a core, and without Python's lock. The results are the same up to float rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewshot_dpkl.heads.training import similarity as forms
from fewshot_dpkl.heads.training.compiled import library
from fewshot_dpkl.heads.training.similarity import LANES

if TYPE_CHECKING:
    from fewshot_dpkl.heads.training.particle import Training

FIELDS = {  # of `Job` in forms.h, in its order
    "layer form unit episodes points features layers width particles classes batch epochs": ctypes.c_int64,
    "frequencies block kappa_every liu_wang first until": ctypes.c_int64,
    "learning_rate momentum second epsilon precision floor prior repulsion": ctypes.c_double,
    "labels orders inputs kernel overlap begun reached products outside shown": ctypes.c_void_p,
    "rows columns scales": ctypes.c_void_p,
    "moved direction square theta theta_mean theta_square kappa scores drift spread": ctypes.c_void_p,
}
OF_DESCENT = {  # of `Descent` in cosine.c, in its order
    "learning_rate momentum dampening weight_decay scale": ctypes.c_double,
    "episodes points width classes epochs batch": ctypes.c_int64,
    "labels orders inputs directions gains": ctypes.c_void_p,
}
CLOSED, FOURIER, DOT, PAIRED = range(4)
NONE, SPAN, FREE = range(3)


def fields_of(kinds: dict[str, Any]) -> list[Any]:
    return [(name, kind) for names, kind in kinds.items() for name in names.split()]


class Job(ctypes.Structure):
    _fields_ = fields_of(FIELDS)


def knows(*tensors: Tensor) -> bool:
    """Whether C is there for tensors like these."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors) and library() is not None


def padded(tensor: Tensor) -> Tensor:
    """Contiguous, with zeros behind rows whose length is not a multiple of LANES; itself where it can be."""
    missing = -tensor.shape[-1] % LANES
    return (torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor).contiguous()


def call(name: str, *arguments: Any) -> None:
    if getattr(library(), name)(*arguments):
        raise MemoryError("there is no memory for a training step; train fewer episodes at once")


def address(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def product(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """`[E, rows, depth]` times `[E, depth, columns]`, plus `onto` if there is one."""
    a, wide = a.contiguous(), padded(b)
    base = None if onto is None else padded(onto)
    out = a.new_empty(*a.shape[:2], wide.shape[-1])
    sizes = (*a.shape[:2], wide.shape[2], a.shape[2])
    tensors = address(a), address(wide), None if base is None else address(base), address(out)
    library().products(*map(ctypes.c_int64, sizes), *tensors)
    return out[..., : b.shape[-1]]


def product_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """`[E, q, D]` times the transpose of `[E, n, D]`."""
    a, b = padded(a), padded(b)
    out = a.new_empty(*a.shape[:2], b.shape[1])
    library().products_of_rows(*map(ctypes.c_int64, (*out.shape, a.shape[2])), *map(address, (a, b, out)))
    return out


def log_means(log_rho: Tensor) -> Tensor:
    """`particle.predictive`."""
    log_rho = log_rho.contiguous()
    (episodes, rows, particles, classes), out = log_rho.shape, torch.empty_like(log_rho[:, :, 0])
    sizes = map(ctypes.c_int64, (episodes * rows, particles, classes))
    library().log_means(*sizes, address(log_rho), address(out))
    return out


def can_rotate(width: int, *tensors: Tensor) -> bool:
    """Whether `rotate` in lanes.h takes rows of this width: a power of two in 1 to 16 registers."""
    return LANES <= width <= 128 and width & (width - 1) == 0 and knows(*tensors)


def through_signs(
    streams: Tensor, points: Tensor, shape: Sequence[int], deviation: float, products: bool
) -> tuple[Tensor, Tensor]:
    """`draws.Start.through` for layers of signs."""
    (episodes, rows, features), (_, m, d) = points.shape, shape
    points, streams = points.contiguous(), streams.contiguous()
    out, of_layers = points.new_empty(episodes, rows, m, d), points.new_empty(episodes, m, m)
    sizes = (*map(ctypes.c_int64, (features, m, d)), ctypes.c_double(deviation), ctypes.c_int64(rows))
    for e in range(episodes):
        tensors = address(points[e]), address(out[e]), address(of_layers[e]) if products else None
        call("through_signs", address(streams[e]), *sizes, *tensors)
    return out, of_layers


class Descent(ctypes.Structure):
    _fields_ = fields_of(OF_DESCENT)


def descend_cosines(
    inputs: Tensor, labels: Tensor, directions: Tensor, gains: Tensor, orders: Tensor, **settings: float
) -> None:
    """`CosineHead._descend`, in place; `settings` are the other fields of `Descent`."""
    wide, begun = padded(inputs), padded(directions)
    (episodes, epochs, n), classes = orders.shape, gains.shape[1]
    labels, orders = labels.long().contiguous(), orders.contiguous()
    tensors = dict(labels=labels, orders=orders, inputs=wide, directions=begun, gains=gains)
    job = Descent(
        episodes=episodes, points=n, width=wide.shape[-1], classes=classes, epochs=epochs,
        **{**settings, "batch": min(settings["batch"], n)},
        **{name: address(tensor) for name, tensor in tensors.items()},
    )  # fmt: skip
    call("descend_cosines", ctypes.byref(job))
    directions.copy_(begun[..., : directions.shape[-1]])


class Work:
    """A job and the tensors that it points to."""

    def __init__(self, theta: Tensor, similarity: forms.Similarity, layer: int, layers: int) -> None:
        episodes, particles, classes, _ = theta.shape
        self.tensors: dict[str, Tensor] = {}
        self.job = Job(
            layer=layer, episodes=episodes, layers=layers, width=theta.shape[-1] + -theta.shape[-1] % LANES,
            particles=particles, classes=classes, unit=similarity.normalised, batch=1,
        )  # fmt: skip
        self.set(theta=padded(theta))
        if isinstance(similarity, forms.FourierKernel):
            self.job.form, self.job.floor = FOURIER, similarity.FLOOR
            self.job.frequencies, self.job.block = len(similarity.frequencies), similarity.per_step
            width = similarity.frequencies.shape[1]
            if similarity.scales is not None and similarity.per_step == width and can_rotate(width, theta):
                self.set(scales=similarity.scales)
            else:
                rows, columns = similarity.packed
                self.set(rows=rows, columns=columns)
        elif isinstance(similarity, forms.PairedProduct):
            self.job.form = PAIRED
        elif layer == NONE:
            self.job.form = DOT
        elif isinstance(similarity, forms.ExactKernel):
            self.job.form, self.job.precision = CLOSED, similarity.precision

    def set(self, **tensors: Tensor) -> None:
        self.tensors |= tensors
        for name, tensor in tensors.items():
            setattr(self.job, name, address(tensor).value)


def can_compare(similarity: forms.Similarity, layered: bool) -> bool:
    if isinstance(similarity, forms.ExactKernel):
        return layered or similarity.precision == 1
    known = (forms.FourierKernel, forms.PairedProduct) if layered else (forms.DotProduct,)
    return isinstance(similarity, known)


def answer(hidden: Tensor, theta: Tensor, similarity: forms.Similarity, layered: bool) -> Tensor | None:
    """`particle.answer`, or None if C does not know how."""
    if not knows(hidden, theta) or not can_compare(similarity, layered):
        return None
    episodes, rows, m, _ = hidden.shape
    work = Work(theta, similarity, FREE if layered else NONE, m)
    z = padded(hidden)  # overwritten, if layered
    log_rho = hidden.new_empty(episodes, rows, *theta.shape[1:3])
    call("answer", ctypes.byref(work.job), ctypes.c_int64(rows), address(z), address(log_rho))
    return log_rho


def steps_of(training: Training) -> Callable[[int, int], None] | None:
    """What takes the steps of `Training` as its own `take_steps` does, or None if C does not know how."""
    from fewshot_dpkl.heads.training import layers as kinds

    layers, theta, similarity = training.layers, training.theta, training.similarity
    if not training.compiled or not knows(theta, layers.points):
        return None
    if not can_compare(similarity, layers.values is not None) or training.optimizer != "adam":
        return None
    (episodes, epochs, n), features = training.orders.shape, layers.points.shape[-1]
    moved: dict[str, Tensor] = {}  # what training moves, by name in the job
    if isinstance(layers, kinds.SpanLayers) and layers.adam and not similarity.joint:
        m = layers.values.shape[2]
        work = Work(theta, similarity, SPAN, m)
        begun, reached = padded(layers.begun), padded(layers.reached)
        work.set(kernel=layers.kernel, overlap=layers.overlap, begun=begun, reached=reached)
        work.set(products=layers.products_of_start, shown=layers.shown)
        moved |= {"moved": layers.values, "direction": layers.direction, "square": layers.square}
    elif isinstance(layers, kinds.FreeLayers) and isinstance(layers.optimise, kinds.Adam):
        m = layers.values.shape[2]
        work = Work(theta, similarity, FREE, m)
        work.set(inputs=layers.points.contiguous())
        of_layers = layers.optimise
        moved |= {"moved": layers.values, "direction": of_layers.mean, "square": of_layers.square}
    elif layers.values is None:
        m = 1
        work = Work(theta, similarity, NONE, m)
        work.set(inputs=padded(layers.points))
        if isinstance(layers, kinds.SpanPoints):
            work.set(outside=layers.outside, shown=layers.shown)
    else:
        return None
    adam = training.move_classes
    assert isinstance(adam, kinds.Adam | kinds.RowAdam)
    moved |= {"theta": theta, "theta_mean": adam.mean}
    if isinstance(adam, kinds.Adam):
        moved |= {"theta_square": adam.square}
    else:
        work.set(theta_square=adam.square)
    inside = {name: padded(tensor) for name, tensor in moved.items()}
    p = theta.shape[1]
    work.set(**inside, labels=training.labels.long().contiguous(), orders=training.orders.contiguous())
    work.set(kappa=theta.new_zeros(episodes, m, m), scores=theta.new_zeros(episodes, p, p))
    work.set(drift=theta.new_zeros(episodes, p, p), spread=theta.new_zeros(episodes, p + 1))
    job = work.job
    job.points, job.features, job.batch, job.epochs = n, features, training.batch_size, epochs
    job.kappa_every, job.liu_wang = training.kappa_every, training.rule == "liu-wang"
    job.learning_rate, job.prior, job.repulsion = training.learning_rate, training.prior, training.repulsion
    job.momentum, job.second, job.epsilon = kinds.MOMENTUM, kinds.SECOND, kinds.EPSILON

    def take_steps(first: int, until: int) -> None:
        work.job.first, work.job.until = first, until
        call("run_steps", ctypes.byref(work.job))
        for name, tensor in moved.items():
            if inside[name] is not tensor and inside[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(inside[name][..., : tensor.shape[-1]])

    return take_steps
