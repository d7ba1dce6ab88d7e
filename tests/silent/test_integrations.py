"""Guards sections 5 and 6 of the issue on silent errors: integrations, as a daily user of diffusers and Lightning."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc import randomness
from fmwc.checks import residuals
from fmwc.checks.evidence import renoised
from fmwc.errors import UsageError
from fmwc.flow import euclidean

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from diffusers.callbacks import MultiPipelineCallbacks

from fmwc.integrations.diffusers import Confidence, check, velocity
from tests.integrations import pipelines

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ("red", "blue")
PROMPTS = [f"a {one} {two} {three}" for one in WORDS for two in WORDS for three in ("cat", "dog", "house", "a", "red")]
PROMPTS += [f"a {one}" for one in ("cat", "dog", "house", "red")]  # 24


@pytest.fixture(autouse=True)
def few_numbers(monkeypatch):
    monkeypatch.setattr(randomness, "NUMBERS", {"cpu": 1})


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """SD3 with text encoders."""
    return pipelines.sd3(text=pipelines.clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture
def confidence(texts):
    with Confidence(texts, fmwc.attach(texts.transformer)) as confidence:
        yield confidence


def draw(pipe, confidence, seed=0, **call):
    call = {"num_inference_steps": 3, "output_type": "latent", "callback_on_step_end": confidence, **call}
    return pipe(**call, generator=torch.Generator().manual_seed(seed)).images


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [17, 24, 32])
def test_velocity_holds_the_conditions_of_every_prompt(texts, count):
    prompts = (PROMPTS * 2)[:count]
    network, cond = velocity(texts, prompts)
    alone, one = velocity(texts, prompts[-1])
    assert {name: len(value) for name, value in cond.items()} == dict.fromkeys(one, count)
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([0.4])
    last = {name: value[-1:] for name, value in cond.items()}
    assert torch.allclose(network(x, t, **last), alone(x, t, **one), atol=1e-5)


def test_a_check_with_more_texts_than_one_batch_uses_each_text(texts):
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).expand(24, -1, -1, -1)
    result = check(texts, x, PROMPTS, evaluations=1, conventions=False)
    space, (network, cond) = euclidean((4, 8, 8)), velocity(texts, PROMPTS[-1])
    cond = {name: value.expand(24, *value.shape[1:]) for name, value in cond.items()}
    found = residuals(network, space, *renoised(space, x, 0.7, 0), cond)
    assert result.score[-1] == pytest.approx(found[0, -1].log().item(), rel=1e-3)


def test_a_string_is_one_prompt(texts):
    assert all(len(value) == 1 for value in velocity(texts, "a cat")[1].values())
    result = check(texts, torch.randn(1, 4, 8, 8), "a cat", rivals="a red dog", evaluations=2, conventions=False)
    assert result.rival == ["a red dog"]


def test_a_string_is_one_prompt_of_a_run(confidence):
    call = {"num_inference_steps": 1, "output_type": "latent"}
    assert len(confidence.best_of(2, "a cat", **call).images) == 1
    runs = []
    confidence.fit_reference("a cat", n=8, labels=lambda images: runs.append(len(images)) or [len(runs) % 2], **call)
    assert runs == [1] * 8


# ---- settings that change within a run -------------------------------------------------------------------------------


def cutoff(pipe, step, timestep, given):
    """Do what diffusers' SD3CFGCutoffCallback does, for more than one prompt."""
    if step == 1:
        pipe._guidance_scale = 0.0
        given |= {name: given[name][-4:] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    return given


def louder(pipe, step, timestep, given):
    if step == 1:
        pipe._guidance_scale = 30.0
    return given


def edited(pipe, step, timestep, given):
    return given | ({"latents": given["latents"] + 0.5} if step == 1 else {})


def edited_in_place(pipe, step, timestep, given):
    if step == 1:
        given["latents"].mul_(1.5)
    return given


class Callback:
    tensor_inputs = ("prompt_embeds", "pooled_prompt_embeds")

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


@pytest.mark.parametrize("change", [cutoff, louder, edited, edited_in_place])
def test_confidence_is_withheld_if_a_run_was_changed_in_the_middle(texts, confidence, change):
    prompts = PROMPTS[:4]
    call = {"prompt": prompts, "guidance_scale": 4.0}
    confidence.fit_reference(prompts, n=2, num_inference_steps=3, guidance_scale=4.0)
    draw(texts, confidence, **call)
    assert confidence.trajectory.confidence is not None
    draw(texts, MultiPipelineCallbacks([confidence, Callback(change)]), **call)
    assert confidence.trajectory.withheld
    draw(texts, MultiPipelineCallbacks([confidence]), **call)
    assert not confidence.trajectory.withheld


# ---- the score of the reference --------------------------------------------------------------------------------------


def test_best_of_uses_the_score_of_a_loaded_reference(texts, confidence, tmp_path):
    call = {"num_inference_steps": 3, "output_type": "latent"}
    prompts = PROMPTS[:4]
    found = []

    def by_endpoint(images):
        found.append(confidence.trajectory.score("endpoint"))
        return found[-1] > found[0].median()

    chosen = confidence.fit_reference(prompts, n=2, labels=by_endpoint, **call)
    assert chosen.score == "endpoint"
    fmwc.save(confidence.field, tmp_path / "field")
    confidence.remove()
    loaded = fmwc.load(tmp_path / "field", network=texts.transformer)
    with Confidence(texts, loaded) as again:
        scores = []
        for seed in range(2):
            draw(texts, again, seed, prompt=prompts)
            scores.append(again.trajectory.score("endpoint"))
        assert torch.equal(again.best_of(2, prompts, **call).score, torch.stack(scores).amin(0))


# ---- pipelines -------------------------------------------------------------------------------------------------------


def test_a_compiled_transformer_is_read_like_the_plain_one():
    pipe, call = pipelines.sd3(), pipelines.embeddings("sd3")
    plain = draw(pipe, None, **call)
    with Confidence(pipe, fmwc.attach(pipe.transformer)) as confidence:
        draw(pipe, confidence, **call)
        expected = confidence.trajectory.score()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    for network in (pipe.transformer, pipe.transformer._orig_mod):  # attached after compiling, or before
        with Confidence(pipe, fmwc.attach(network)) as confidence:
            assert torch.equal(draw(pipe, confidence, **call), plain)
            assert torch.allclose(confidence.trajectory.score(), expected, rtol=1e-4)


class Painter(nn.Module):
    """A class-conditional network, called by position."""

    def __init__(self):
        super().__init__()
        self.layer, self.classes = nn.Conv2d(4, 4, 3, padding=1), nn.Embedding(10, 4)

    def forward(self, sample, timestep, class_labels):
        level = timestep.reshape(-1, 1, 1, 1) / 1000
        return (self.layer(sample) * level + self.classes(class_labels)[:, :, None, None],)


def by_class(with_callback=True):
    from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

    class Classes(DiffusionPipeline):
        def __init__(self, transformer, scheduler):
            super().__init__()
            self.register_modules(transformer=transformer, scheduler=scheduler)

        @torch.no_grad()
        def __call__(
            self,
            class_labels,
            num_inference_steps=3,
            generator=None,
            output_type=None,
            guidance_scale=None,
            callback_on_step_end=None,
        ):
            labels = torch.tensor(class_labels)
            latents = torch.randn(len(labels), 4, 8, 8, generator=generator)
            self.scheduler.set_timesteps(num_inference_steps)
            for i, t in enumerate(self.scheduler.timesteps):
                v = self.transformer(latents, t.expand(len(labels)), labels)[0]
                latents = self.scheduler.step(v, t, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    latents = callback_on_step_end(self, i, t, {"latents": latents}).pop("latents", latents)
            return type("Output", (), {"images": latents})

    class WithoutCallback(Classes):
        def __call__(self, class_labels):
            pass

    torch.manual_seed(0)
    made = Classes if with_callback else WithoutCallback
    return made(Painter(), FlowMatchEulerDiscreteScheduler())


@pytest.mark.parametrize("given", [([3, 7],), ()], ids=["by position", "by keyword"])
def test_a_pipeline_of_classes_is_read(given):
    pipe = by_class()
    keyword = {} if given else {"class_labels": [3, 7]}
    with Confidence(pipe, fmwc.attach(pipe.transformer)) as confidence:
        best = confidence.best_of(2, *given, **keyword)
        assert len(best.images) == 2
        assert confidence.fit_reference(*given, n=4, **keyword).score == "integrated"
    network, cond = velocity(pipe, *given, **keyword)
    assert cond["class_labels"].tolist() == [3, 7]
    x = torch.randn(2, 4, 8, 8)
    expected = pipe.transformer(x, torch.tensor([700.0, 700.0]), torch.tensor([3, 7]))[0]
    assert torch.allclose(network(x, torch.tensor([0.3, 0.3]), **cond), -expected, atol=1e-5)


def test_a_pipeline_that_cannot_be_read_is_refused_with_what_to_use():
    pipe = by_class(with_callback=False)
    for use in (lambda: Confidence(pipe, fmwc.attach(pipe.transformer)), lambda: velocity(pipe, [3])):
        with pytest.raises(UsageError, match="timestepped"):
            use()


# ---- Lightning -------------------------------------------------------------------------------------------------------


def test_ten_classes_are_reported_by_an_echo_and_training_goes_on(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from fmwc.integrations.lightning import ConfidenceCallback

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(13, 2)

        def forward(self, x, t, y):
            return self.layer(torch.cat([x, t[:, None], nn.functional.one_hot(y, 10)], 1))

    class Flow(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return fmwc.flow_matching_loss(self.net, (2,), batch[0], cond={"y": batch[1]})

        def validation_step(self, batch, _):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    data = torch.utils.data.TensorDataset(torch.randn(40, 2), torch.arange(40) % 10)
    loader = torch.utils.data.DataLoader(data, 20)
    callback = ConfidenceCallback("net", batch=lambda batch: (batch[0], {"y": batch[1]}), count=20, steps=2)
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], **options)
    trainer.fit(Flow(), loader, loader)
    assert trainer.current_epoch == 2
    assert callback.run.default_score == "echo"
    callback.check = 10
    with torch.no_grad():
        x, y = data.tensors
        callback._compared(Net(), x, {"y": y})
    assert callback.run.default_score == "contest"


# ---- sbi -------------------------------------------------------------------------------------------------------------


class Estimator(nn.Module):
    """Called like sbi's FMPE: `(theta, condition, time)` with noise at time 1 and a velocity to the noise."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, input, condition, time):
        return self.layer(torch.cat([input, condition, time[:, None]], 1))


def test_the_estimator_of_sbi_is_adapted_as_the_libraries_page_says():
    sbi = Estimator()
    velocity = fmwc.adapters.adapt(sbi, time="time", backwards=True)
    theta, observed, t = torch.randn(6, 2), torch.randn(6, 2), torch.rand(6)
    assert torch.equal(velocity(theta, t, condition=observed), -sbi(theta, observed, 1 - t))
    run = fmwc.sample(fmwc.attach(velocity, space=(2,)), 6, steps=10, cond={"condition": observed})
    assert run.rank.shape == (6,)
