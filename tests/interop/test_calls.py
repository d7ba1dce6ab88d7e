"""Adapters return the same values as the original calls, and fields run in the original libraries' loops."""

import importlib.util

import pytest
import torch

import fmwc
from benchmarks.foreign_networks import NETWORKS
from fmwc.sampling import SamplingConfig


def field_of(name):
    if NETWORKS[name].missing:
        pytest.skip(f"{NETWORKS[name].needs} is not installed; make test-interop has it")
    return NETWORKS[name].field(), *NETWORKS[name].inputs(3)


CALLS = {
    "torchcfm UNet": lambda net, x, t, cond: net(t, x),
    "diffusers UNet2DModel": lambda net, x, t, cond: net(x, 1000 * t).sample,
    "diffusers UNet2DConditionModel": lambda net, x, t, cond: net(x, 1000 * t, **cond).sample,
    "diffusers DiTTransformer2DModel": lambda net, x, t, cond: net(x, 1000 * t, **cond).sample,
    "diffusers SD3Transformer2DModel": lambda net, x, t, cond: -net(x, timestep=1000 * (1 - t), **cond).sample,
}


@pytest.mark.parametrize("name", CALLS)
def test_adapter_equals_the_original_call(name):
    field, x, t, cond = field_of(name)
    torch.testing.assert_close(field(x, t, **cond), CALLS[name](field.network.network, x, t, cond))


def test_the_time_of_flux_is_multiplied_by_the_network_itself():
    field, x, t, cond = field_of("diffusers FluxTransformer2DModel")
    seen = []
    embed = field.network.network.time_text_embed
    embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    field(x, t, **cond)
    torch.testing.assert_close(seen[0], 1000 * (1 - t))


class Sure(torch.nn.Module):
    """An exact backbone for data at one point."""

    def __init__(self):
        super().__init__()
        self.point = torch.nn.Parameter(torch.tensor([2.0, -1.0]))

    def forward(self, x, t):
        return self.point.expand_as(x)


def test_denoiser_velocity_leads_to_the_data():
    pytest.importorskip("azula", reason="azula is not installed; make test-interop has it")
    from azula.denoise import SimpleDenoiser
    from azula.noise import CosineSchedule, RectifiedSchedule, VESchedule

    for schedule in (RectifiedSchedule(), CosineSchedule()):
        velocity = fmwc.adapters.Denoised(SimpleDenoiser(Sure(), schedule))
        run = fmwc.sample(velocity, 16, steps=200, confidence=None, config=SamplingConfig(space=(2,)))
        torch.testing.assert_close(run.x, torch.tensor([2.0, -1.0]).expand(16, 2), atol=0.02, rtol=0)
    with pytest.raises(fmwc.FmwcError, match=r"ends at 1 of data and 1e\+03 of noise"):
        fmwc.adapters.Denoised(SimpleDenoiser(Sure(), VESchedule()))


# ---- other people's loops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["diffusers SD3Transformer2DModel", "diffusers UNet2DModel"])
def test_loop_of_a_diffusers_pipeline(name):
    """A pipeline's loop over timesteps from 1000 to 0 with `scheduler.step` gives our samples, with confidence."""
    field, x0, _, cond = field_of(name)
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1 - k / 8 for k in range(8)])
    watched = fmwc.VarianceRecorder(field, fmwc.estimators.Linearised(4))
    x = x0
    for timestep in scheduler.timesteps:
        v = watched(x, 1 - timestep / 1000, **cond)
        x = scheduler.step(-v, timestep, x).prev_sample
    run = watched.trajectory(x)
    ours = fmwc.sample(field, x0=x0, steps=8, confidence=fmwc.estimators.Linearised(4), cond=cond)
    torch.testing.assert_close(run.x, ours.x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run.times, ours.times)
    torch.testing.assert_close(run.score("integrated"), ours.score("integrated"), rtol=0.5, atol=0)  # other probes
    assert run.rank.shape == (3,)


class StandInSolver:
    """A stand-in for flow_matching's ODESolver. It calls `velocity_model(x=…, t=…, **extras)`, where t is a number."""

    def __init__(self, velocity_model):
        self.velocity_model = velocity_model

    def sample(self, x_init, step_size, method="euler", **model_extras):
        assert method == "euler"
        x, steps = x_init, round(1 / step_size)
        for k in range(steps):
            x = x + step_size * self.velocity_model(x=x, t=torch.tensor(k * step_size), **model_extras)
        return x


def solvers():
    yield StandInSolver
    if importlib.util.find_spec("flow_matching") and importlib.util.find_spec("torchdiffeq"):
        from flow_matching.solver import ODESolver

        yield ODESolver


@pytest.mark.parametrize("package", ["stand-in", "flow_matching"])
def test_solver_of_flow_matching(package):
    found = dict(zip(("stand-in", "flow_matching"), solvers(), strict=False))
    if package not in found:
        pytest.skip("flow_matching is not installed: CC BY-NC, so that nothing here installs it")
    field, x0, _, _ = field_of("flow_matching ModelWrapper")
    plain = found[package](velocity_model=field).sample(x_init=x0, method="euler", step_size=0.05)
    watched = fmwc.VarianceRecorder(field)
    seen = found[package](velocity_model=watched).sample(x_init=x0, method="euler", step_size=0.05)
    run, ours = watched.trajectory(seen), fmwc.sample(field, x0=x0, steps=20)
    assert torch.equal(seen, plain)
    torch.testing.assert_close(run.x, ours.x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.var[:20], ours.var, rtol=1e-3, atol=0)
    torch.testing.assert_close(run.score(), ours.score(), rtol=1e-3, atol=0)
