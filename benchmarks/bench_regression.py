"""Time the regressors against gpytorch's exact GP with a deep kernel: same data, start, epochs and optimiser.

    python benchmarks/bench_regression.py --dataset elevators --size 100 --trials 10

All rows are measured in one run on the same threads; read the ratios, not the seconds. Ratios are of CPU
time, which a busy machine disturbs less than the clock (use --threads 1). The first two rows
train the same model from the same weights, so their errors agree up to rounding. "one by one" is the same
code with one trial per batch; "loop over particles" writes DPKL the plain way, a network per particle.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fewshot_dpkl.commands.cli import add_device_arguments, run, use_device
from fewshot_dpkl.data.uci import read_uci, split_trials
from fewshot_dpkl.experiments.uci.sweep import Cell, trial_tensors
from fewshot_dpkl.kernels import fourier_features
from fewshot_dpkl.particles import functional_gradient
from fewshot_dpkl.regression import DKLRegressor, DPKLRegressor
from fewshot_dpkl.regression.gp import gaussian_nll
from fewshot_dpkl.regression.training import Model, train

warnings.filterwarnings("ignore", category=FutureWarning)  # gpytorch's use of torch.jit
Prediction = tuple[Tensor, Tensor]  # means and variances of y, each [T, q]


def as_module(model: Model, trial: int, particle: int) -> nn.Sequential:
    """The network of one particle as torch modules."""
    flat, layers = model.parameters[trial, particle], []
    for fan_in, fan_out in model.embedding.layers:  # type: ignore[union-attr]
        layer = nn.Linear(fan_in, fan_out)
        layer.weight.data = flat[: fan_in * fan_out].view(fan_in, fan_out).T.clone()
        layer.bias.data = flat[fan_in * fan_out :][:fan_out].clone()
        flat = flat[fan_in * fan_out + fan_out :]
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def gpytorch_dkl(model: Model, x: Tensor, y: Tensor, x_test: Tensor, epochs: int) -> Prediction:
    import gpytorch

    class DeepKernelGP(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: nn.Module, network: nn.Module) -> None:
            super().__init__(x, y, likelihood)
            self.network = network
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.RBFKernel()

        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            z = self.network(x)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(z), self.covar_module(z))

    predictions = []
    for trial in range(len(x)):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        gp = DeepKernelGP(x[trial], y[trial].float(), likelihood, as_module(model, trial, 0))
        likelihood.noise, gp.covar_module.lengthscale = 1.0, 1.0
        optimizer = torch.optim.NAdam(gp.network.parameters(), lr=1e-3)
        marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
        for _ in range(epochs):
            optimizer.zero_grad()
            (-marginal(gp(x[trial]), y[trial].float()) * x.shape[1]).backward()
            optimizer.step()
        gp.eval()
        with torch.no_grad():
            answer = likelihood.eval()(gp(x_test[trial].float()))
        predictions.append((answer.mean, answer.variance))
    mean, variance = zip(*predictions, strict=True)
    return torch.stack(mean).double(), torch.stack(variance).double()


def particle_loop(model: Model, x: Tensor, y: Tensor, x_test: Tensor, epochs: int) -> Prediction:
    """DPKL as one would first write it: one trial, one network and one matrix inverse at a time."""
    assert model.frequencies is not None
    predictions = []
    for trial in range(len(x)):
        networks = [as_module(model, trial, particle) for particle in range(model.parameters.shape[1])]
        optimizers = [torch.optim.NAdam(network.parameters(), lr=1e-3) for network in networks]

        def embed(inputs: Tensor, networks: list[nn.Sequential] = networks, trial: int = trial) -> Tensor:
            assert model.frequencies is not None
            return torch.stack(
                [fourier_features(g(inputs), model.frequencies[trial]) for g in networks]
            ).mean(0)

        eye = torch.eye(x.shape[1])
        for _ in range(epochs):
            for optimizer in optimizers:
                optimizer.zero_grad()
            features = embed(x[trial])
            covariance, target = features @ features.T + eye, y[trial].float()
            loss = 0.5 * target @ torch.linalg.inv(covariance) @ target + 0.5 * torch.logdet(covariance)
            loss.backward()
            weights = [[p for p in network.parameters() if p.grad is not None] for network in networks]
            flat = torch.stack([torch.cat([p.detach().flatten() for p in ps]) for ps in weights])
            gradients = torch.stack(
                [torch.cat([p.grad.flatten() for p in ps if p.grad is not None]) for ps in weights]
            )
            direction = functional_gradient(flat, gradients)
            for parameters, row, optimizer in zip(weights, direction, optimizers, strict=True):
                for p, part in zip(parameters, row.split([p.numel() for p in parameters]), strict=True):
                    p.grad = part.view_as(p)
                optimizer.step()
        with torch.no_grad():
            features, new = embed(x[trial]), embed(x_test[trial].float())
            inverse = torch.linalg.inv(features @ features.T + eye)
            rows = new @ features.T
            variance = new.square().sum(-1) - (rows @ inverse * rows).sum(-1) + 1
            predictions.append((rows @ inverse @ y[trial].float(), variance))
    mean, variances = zip(*predictions, strict=True)
    return torch.stack(mean).double(), torch.stack(variances).double()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="elevators")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    add_device_arguments(parser)
    arguments = parser.parse_args()
    if use_device(arguments).type != "cpu":
        raise ValueError("this benchmark compares CPU code; use --device cpu")
    x_all, y_all = read_uci(arguments.dataset, arguments.data_root)
    split = split_trials(len(x_all), arguments.size, arguments.trials, unlabelled=0, seed=arguments.seed)
    rows = (split.test, split.training, split.labelled, split.unlabelled)
    tensors = trial_tensors(Cell(arguments.dataset, "dpkl", arguments.size, x_all, y_all, *rows))
    x, y, x_test, y_test = (tensors[name] for name in ("x", "y", "x_test", "y_test"))
    seeds = range(arguments.seed, arguments.seed + arguments.trials)
    dkl, dpkl = (regressor.start(x.shape[-1], seeds) for regressor in (DKLRegressor(), DPKLRegressor()))

    def ours(model: Model, batch: int) -> Callable[[], Prediction]:
        kind = DKLRegressor() if model is dkl else DPKLRegressor()
        settings = replace(kind.settings(), epochs=arguments.epochs, validation_fraction=0.0)

        def measured() -> Prediction:
            parts = []
            for begin in range(0, arguments.trials, batch):
                part = slice(begin, begin + batch)
                start = (kind.start(x.shape[-1], seeds[part]), x[part], y[part])
                parts.append(train(*start, None, settings).predict(x_test[part]))
            mean, variance = zip(*parts, strict=True)
            return torch.cat(mean), torch.cat(variance)

        return measured

    contenders: dict[str, Callable[[], Prediction]] = {
        "DKL, gpytorch, one by one": lambda: gpytorch_dkl(dkl, x, y, x_test, arguments.epochs),
        "DKL, one batch": ours(dkl, arguments.trials),
        "DKL, one by one": ours(dkl, 1),
        "DPKL, loop over particles": lambda: particle_loop(dpkl, x, y, x_test, arguments.epochs),
        "DPKL, one batch": ours(dpkl, arguments.trials),
        "DPKL, one by one": ours(dpkl, 1),
    }
    threads = torch.get_num_threads()
    print(f"{arguments.dataset}, n = {arguments.size}, {arguments.trials} trials, {threads} threads")
    print(f"{'':28s}{'s a trial':>10s}{'CPU s':>8s}{'gpytorch / it':>15s}{'RMSE':>8s}{'NLL':>8s}")
    ours(dkl, arguments.trials)()  # warm up
    base = math.nan
    for name, contender in contenders.items():
        started, cpu_started = time.perf_counter(), time.process_time()
        mean, variance = contender()
        seconds = (time.perf_counter() - started) / arguments.trials
        cpu = (time.process_time() - cpu_started) / arguments.trials
        base = cpu if math.isnan(base) else base
        rmse = float((mean - y_test).square().mean(-1).sqrt().mean())
        nll = float(gaussian_nll(y_test, mean, variance).mean())
        print(f"{name:28s}{seconds:10.3f}{cpu:8.3f}{base / cpu:15.2f}{rmse:8.3f}{nll:8.3f}", flush=True)


if __name__ == "__main__":
    run(main)
