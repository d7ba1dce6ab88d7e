"""Confidence of diffusers' pipelines, on tiny random pipelines built from configurations."""

import itertools

import pytest
import torch
from torch import nn

import fmwc
from fmwc import randomness
from fmwc.adapters import Guided, timestepped
from fmwc.checks import residuals
from fmwc.checks.evidence import renoised
from fmwc.errors import UsageError
from fmwc.estimators import Linearised
from fmwc.flow import euclidean

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from fmwc.integrations.diffusers import Confidence, check, encode, velocity
from tests.integrations import pipelines

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:diffusers", "ignore::FutureWarning:diffusers", "ignore::DeprecationWarning:transformers"
)

NAMES = list(pipelines.PIPELINES)
_BUILT: dict = {}


def pipeline(name):
    if name not in _BUILT:
        _BUILT[name] = pipelines.PIPELINES[name]()
    return _BUILT[name]


def draw(pipe, call, seed=0, **more):
    options = {"output_type": "latent", **call, **more}
    return pipe(**options, generator=torch.Generator().manual_seed(seed)).images


@pytest.fixture(autouse=True)
def few_numbers(monkeypatch):
    """Draw noise for the images at hand only; blocks of many samples would dominate the time of tiny networks."""
    monkeypatch.setattr(randomness, "NUMBERS", {"cpu": 1})


@pytest.fixture
def sd3():
    return pipeline("sd3")


@pytest.fixture
def reader(sd3):
    """A Confidence of SD3; its hooks are removed at the end."""
    with Confidence(sd3, fmwc.attach(sd3.transformer, initial_log_alpha=-5.0)) as confidence:
        yield confidence


@pytest.fixture
def counted(sd3):
    """The number of calls of SD3's network by the pipeline, without those of the readings."""
    calls = []
    original = sd3.transformer.pos_embed.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    yield calls
    original.remove()


# ---- every pipeline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_images_are_those_of_the_pipeline(name):
    pipe, call = pipeline(name), pipelines.embeddings(name)
    plain = draw(pipe, call, output_type="pt")
    with Confidence(pipe, fmwc.attach(pipe.transformer)) as confidence:
        read = draw(pipe, call, output_type="pt", callback_on_step_end=confidence)
        run, pixels = confidence.trajectory, confidence.doubt_map()
    assert torch.equal(read, plain)
    assert torch.equal(draw(pipe, call, output_type="pt"), plain)  # nothing is left behind
    assert not torch.is_grad_enabled() or all(p.grad is None for p in pipe.transformer.parameters())
    assert run.score().shape == (2,)
    assert bool((run.score() > 0).all())
    assert pixels.shape == (2, *plain.shape[-2:])
    assert "no reference" in run.withheld
    assert len(run.times) == 3
    assert bool((run.times.diff(dim=0) > 0).all())
    assert float(run.times[0, 0]) == pytest.approx(0, abs=1e-3)
    assert bool(run.mean.isnan().all())  # velocities are not kept


@pytest.mark.parametrize("name", NAMES)
def test_the_adapted_network_takes_the_steps_of_the_pipeline(name):
    """Time and sign are right if Euler steps of the adapter, towards the data, end where the pipeline ends."""
    pipe, call = pipeline(name), pipelines.embeddings(name, guided=False)
    seen = []
    handle = pipe.transformer.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    with Confidence(pipe, fmwc.attach(pipe.transformer)) as confidence:
        end = draw(pipe, call, callback_on_step_end=confidence)
        run = confidence.trajectory
    handle.remove()
    start = seen[0][:2]
    network, cond = velocity(pipe, **{k: v for k, v in call.items() if k != "num_inference_steps"})
    x = start
    with torch.no_grad():
        for t, after in itertools.pairwise(run.grid):
            x = x + network(x, t, **cond) * (after - t)[0]
    assert torch.allclose(x, end, atol=1e-4)
    assert not torch.allclose(x, start, atol=0.1)


def test_image_to_image_begins_between_noise_and_data(sd3):
    from diffusers import StableDiffusion3Img2ImgPipeline

    pipe = StableDiffusion3Img2ImgPipeline(**sd3.components)
    pipe.set_progress_bar_config(disable=True)
    call = pipelines.embeddings("sd3") | {"strength": 0.5, "num_inference_steps": 6, "image": torch.rand(2, 3, 64, 64)}
    with Confidence(pipe, fmwc.attach(pipe.transformer)) as confidence:
        images = draw(pipe, call, callback_on_step_end=confidence)
        run = confidence.trajectory
    assert torch.equal(images, draw(pipe, call))
    assert len(run.times) == 3
    assert torch.allclose(run.times[:, 0], 1 - pipe.scheduler.sigmas[3:6], atol=1e-4)
    assert bool((run.score() > 0).all())


def test_half_precision():
    pipe, call = pipelines.sd3(), pipelines.embeddings("sd3")
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        pipe.to(dtype)
        call = {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        plain = draw(pipe, call)
        with Confidence(pipe, fmwc.attach(pipe.transformer), probes=8) as confidence:
            assert torch.equal(draw(pipe, call, callback_on_step_end=confidence), plain)
            scores.append(confidence.trajectory.score())
    assert torch.allclose(*scores, rtol=0.1)


# ---- the variance ----------------------------------------------------------------------------------------------------


def first_variance(pipe, call, probes, **attach):
    field = fmwc.attach(pipe.transformer, initial_log_alpha=-7.0, **attach)
    with Confidence(pipe, field, probes=probes) as confidence:
        draw(pipe, call | {"num_inference_steps": 1}, callback_on_step_end=confidence)
        return confidence.trajectory.var[0]


@pytest.mark.parametrize("name", ["sd3", "lumina2"])  # two blocks of rows in one call, and two calls
def test_the_guided_variance_agrees_with_the_adapter_of_guidance(name):
    pipe, call, seen = pipeline(name), pipelines.embeddings(name, count=1), []
    call |= {"cfg_normalization": False} if name == "lumina2" else {}
    handle = pipe.transformer.register_forward_hook(lambda _, args, kwargs, out: seen.append(kwargs), with_kwargs=True)
    var = first_variance(pipe, call, probes=60)
    handle.remove()
    network, cond = velocity(
        pipe, **{k: v for k, v in call.items() if k not in ("num_inference_steps", "guidance_scale")}
    )
    null = {"encoder_hidden_states": call["negative_prompt_embeds"][0]}
    if name == "sd3":
        null["pooled_projections"] = call["negative_pooled_prompt_embeds"][0]
    field = fmwc.attach(Guided(network, call["guidance_scale"], **null), space=(4, 8, 8), initial_log_alpha=-7.0)
    expected = field.moments(seen[0]["hidden_states"][:1], 0.0, Linearised(), cond=cond).var.sum(1)
    assert (var.sum() / expected.sum()).item() == pytest.approx(1, abs=0.08)
    assert (var / expected).log().abs().median() < 0.2


def test_the_guided_variance_in_closed_form(sd3):
    """With noise in the last layer only, the variance is α θ² (h₀ + w (h₁ − h₀))², as for one draw of the weights."""
    seen = []
    handle = sd3.transformer.proj_out.register_forward_hook(lambda layer, args, out: seen.append(args[0].detach()))
    var = first_variance(sd3, pipelines.embeddings("sd3"), 100, include="proj_out")
    handle.remove()
    without, with_prompt = seen[0].chunk(2)
    h = without + 4.0 * (with_prompt - without)  # (B, 16 patches, C)
    expected = torch.exp(torch.tensor(-7.0)) * h.square() @ sd3.transformer.proj_out.weight.square().mT
    patches = expected.unflatten(2, (2, 2, 4)).sum(-1).unflatten(1, (4, 4))  # (B, row, column, y, x)
    expected = patches.transpose(2, 3).reshape(2, 8, 8)
    assert (var.sum() / expected.sum()).item() == pytest.approx(1, abs=0.05)
    assert (var / expected).log().abs().median() < 0.15
    separate = 9 * without.square() + 16 * with_prompt.square()
    assert (separate.sum() / h.square().sum()) > 3  # independent noise would be another variance


def test_doubt_is_where_the_noise_is(sd3):
    """Noise that acts on one quarter of the patches only shows there and nowhere else."""
    pipe = sd3
    quarter = torch.zeros(4, 4)
    quarter[:2, 2:] = 1  # the upper right
    handle = pipe.transformer.proj_out.register_forward_pre_hook(lambda layer, args: args[0] * quarter.view(1, 16, 1))
    try:
        with Confidence(pipe, fmwc.attach(pipe.transformer, include="proj_out")) as confidence:
            draw(pipe, pipelines.embeddings("sd3"), callback_on_step_end=confidence)
            run, pixels = confidence.trajectory, confidence.doubt_map()
            latent = (run.var * run.weights[..., None, None]).sum(0)
    finally:
        handle.remove()
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[:4, 4:] = True
    assert bool((latent[:, inside] > 0).all())
    assert not latent[:, ~inside].any()
    assert bool((pixels[:, 4:28, 36:60] > 0).all())
    assert not pixels[:, 36:].any()
    assert not pixels[:, :, :28].any()


# ---- early stop and best of n ----------------------------------------------------------------------------------------


def test_a_run_stops_when_all_scores_are_too_high(reader, sd3, counted):
    call = pipelines.embeddings("sd3") | {"num_inference_steps": 6}
    whole = draw(sd3, call, callback_on_step_end=reader)
    run, evaluations = reader.trajectory, sum(not grad for grad in counted)
    low, high = sorted(run.score().tolist())
    reader.stop = (low + high) / 2  # one of two images stays below it
    assert torch.equal(draw(sd3, call, callback_on_step_end=reader), whole)
    assert not reader.stopped
    counted.clear()
    reader.stop = low / 2
    draw(sd3, call, callback_on_step_end=reader)
    assert 0 < reader.stopped < 6
    assert sum(not grad for grad in counted) < evaluations
    assert f"stopped after {reader.stopped} of 6 steps" in reader.trajectory.withheld
    assert len(reader.trajectory.grid) == reader.stopped + 1


def test_best_of_returns_the_images_with_the_lowest_scores(reader, sd3):
    call = pipelines.embeddings("sd3", count=3) | {"output_type": "latent"}
    scores, images = [], []
    for seed in range(3):
        images.append(draw(sd3, call, seed, callback_on_step_end=reader))
        scores.append(reader.trajectory.score())
    least, which = torch.stack(scores).min(0)
    best = reader.best_of(3, **call)
    assert len(which.unique()) > 1
    assert torch.equal(best.score, least)
    assert best.seed.tolist() == which.tolist()
    for row, image in enumerate(best.images):
        assert torch.equal(image, images[which[row]][row])
    assert reader.stop is None


# ---- references ------------------------------------------------------------------------------------------------------


def test_a_reference_gives_confidence_to_runs_with_the_same_settings(reader, sd3, tmp_path):
    call = pipelines.embeddings("sd3", count=4)
    reference = reader.fit_reference(n=3, seed=100, **call)
    assert reference.score == "integrated"
    draw(sd3, call, seed=100, callback_on_step_end=reader)
    run = reader.trajectory
    assert not run.withheld
    assert bool(run.mean.isnan().all())  # velocities are not kept
    assert bool(((run.confidence >= 0) & (run.confidence <= 1)).all())
    order = run.score().argsort()
    assert bool((run.confidence[order].diff() <= 0).all())
    others = (({"num_inference_steps": 5}, "5 Euler"), ({"guidance_scale": 2.0}, "weights -1/2"))
    for change, why in others:
        draw(sd3, call | change, callback_on_step_end=reader)
        assert why in reader.trajectory.withheld
    fmwc.save(reader.field, tmp_path / "field")
    loaded = fmwc.load(tmp_path / "field", network=sd3.transformer)
    reader.remove()
    with Confidence(sd3, loaded) as again:
        draw(sd3, call, seed=100, callback_on_step_end=again)
        assert torch.allclose(again.trajectory.confidence, run.confidence)


def test_the_noise_is_fitted_on_latents(sd3):
    call = {k: v for k, v in pipelines.embeddings("sd3", count=8, guided=False).items() if k != "num_inference_steps"}
    before = draw(sd3, call)
    network, cond = velocity(sd3, **call)
    field = fmwc.attach(network, space=(4, 8, 8))
    latents = torch.randn(8, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    history = fmwc.fit_noise(field, latents, steps=25, batch=8, lr=5e-3, beta=1.0, cond=cond, confidence=False, every=1)
    losses = [loss for _, loss in history]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert torch.equal(draw(sd3, call), before)
    with Confidence(sd3, field) as confidence:
        draw(sd3, call, callback_on_step_end=confidence)
        assert confidence.trajectory.score().shape == (8,)


# ---- checks of finished images ---------------------------------------------------------------------------------------


@pytest.fixture
def knowing(tmp_path):
    """SD3 with text encoders, and a network that knows the images of each prompt: a constant made from its text."""
    pipe = pipelines.sd3(text=pipelines.clip(tmp_path))

    def forward(hidden_states, timestep, encoder_hidden_states, **options):
        noise_level = (timestep / 1000).view(-1, 1, 1, 1)
        return ((hidden_states - image_of(encoder_hidden_states)) / noise_level,)

    pipe.transformer.forward = forward
    return pipe


def image_of(text):  # (B, L, C) -> (B, 4, 8, 8)
    return text[:, :8].flatten(1)[:, : 4 * 8 * 8].reshape(-1, 4, 8, 8)


def test_a_contest_between_prompts_names_the_right_one(knowing):
    prompts = ["a red cat", "a blue dog", "a house"]
    with torch.no_grad():
        texts = knowing.encode_prompt(prompts, None, None, do_classifier_free_guidance=False)[0]
    latents = image_of(texts)
    result = check(knowing, latents, prompts, rivals=prompts, evaluations=6, conventions=False)
    assert result.evidence == "contest"
    assert bool((result.margin > 0).all())
    wrong = check(knowing, latents, [prompts[1], *prompts[1:]], rivals=prompts, evaluations=6, conventions=False)
    assert wrong.rival[0] == "a red cat"
    assert wrong.margin[0] < 0 < wrong.margin[1]
    outside = check(knowing, latents[:1], ["a blue dog"], rivals=["a house", "a red cat"], conventions=False)
    assert (outside.rival, bool(outside.margin < 0)) == (["a red cat"], True)
    assert not knowing.transformer._forward_hooks


def test_an_echo_is_the_residual_on_noised_copies(knowing):
    prompts = ["a red cat", "a blue dog"]
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    result = check(knowing, latents, prompts, evaluations=1, seed=3, conventions=False)
    network, cond = velocity(knowing, prompts)
    found = residuals(network, euclidean((4, 8, 8)), *renoised(euclidean((4, 8, 8)), latents, 0.7, 3), cond)
    assert result.evidence == "echo"
    assert torch.allclose(result.score, found[0].log(), rtol=1e-4)


@pytest.mark.parametrize("name", ["sd3", "flux", "sana"])
def test_images_are_encoded_as_the_network_sees_them(name):
    pipe = pipeline(name)
    side = 16 if name == "sana" else pipelines.SIDE
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    latents = encode(pipe, images)
    if name == "sana":
        latent = pipe.vae.encode(2 * images - 1).latent
        assert torch.allclose(latents, latent * pipe.vae.config.scaling_factor, atol=1e-5)
        return
    latent = (pipe.vae.encode(2 * images - 1).latent_dist.mode() - 0.1) * 1.5
    found = latents if name == "sd3" else pipe._unpack_latents(latents, side, side, pipe.vae_scale_factor)
    assert torch.allclose(found, latent, atol=1e-5)


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_errors_name_what_to_do(reader, sd3, monkeypatch):
    from diffusers import DPMSolverMultistepScheduler

    with pytest.raises(UsageError, match="attached"):
        Confidence(sd3, fmwc.attach(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="inference_mode"), torch.inference_mode():
        draw(sd3, pipelines.embeddings("sd3"), callback_on_step_end=reader)
    reader.remove()
    random = type(sd3.scheduler).from_config(sd3.scheduler.config, stochastic_sampling=True)
    for other, told in ((DPMSolverMultistepScheduler(), "Euler"), (random, "stochastic_sampling")):
        monkeypatch.setattr(sd3, "scheduler", other)
        with pytest.raises(UsageError, match=told):
            Confidence(sd3, reader.field)


@pytest.mark.parametrize("interrupted", [False, True])
def test_training_the_network_is_not_disturbed(interrupted, reader, sd3):
    call = pipelines.embeddings("sd3")
    if interrupted:

        def interrupt(layer, args):
            raise KeyboardInterrupt

        handle = sd3.transformer.proj_out.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            draw(sd3, call, callback_on_step_end=reader)
        handle.remove()
        reader.remove()
    else:
        draw(sd3, call, callback_on_step_end=reader)
    network, cond = (
        timestepped(sd3.transformer, backwards=True),
        {
            "encoder_hidden_states": call["prompt_embeds"],
            "pooled_projections": call["pooled_prompt_embeds"],
        },
    )
    v = network(torch.randn(2, 4, 8, 8), torch.tensor([0.2, 0.4]), **cond)
    weight = next(sd3.transformer.parameters())
    assert torch.autograd.grad(v.sum(), weight)[0].any()
    with torch.no_grad():
        assert not network(torch.randn(2, 4, 8, 8), torch.tensor([0.2, 0.4]), **cond).requires_grad
        assert not torch.is_grad_enabled()
