"""Processes, samplers and guidance, against numpy in float64 and a Gaussian whose samples are known.

Data N(mean, spread^2) with noise are a Gaussian at each time, so that the best model and the end of each way
from noise are closed forms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.decode import diffusion
from crossattn.decode.diffusion import DDIM, DDPM, DataFlow, Euler, Flow, guided, noised, sample

MEAN, SPREAD = np.array([1.5, -0.5, 0.0]), np.array([0.3, 0.8, 1.0])
RNG = np.random.default_rng(0)


def schedule(steps=1000, first=1e-4, last=0.02):
    """Returns a and s of the steps 0 to T by the equations of Ho et al. 2020, one after the other."""
    kept = [1.0]
    for t in range(1, steps + 1):
        beta = first + (last - first) * (t - 1) / (steps - 1)
        kept.append(kept[-1] * (1 - beta))
    return np.sqrt(kept), np.sqrt(1 - np.array(kept))


def rates(process, time):
    if isinstance(process, Flow):
        return 1 - time, time
    a, s = schedule(process.steps, process.first, process.last)
    step = int(round(time * process.steps))
    return a[step], s[step]


def target(process, data, noise):
    """What a model of the process should say."""
    if isinstance(process, DataFlow):
        return data
    return noise - data if isinstance(process, Flow) else noise


def best(process, x, time):
    """Returns what the best model says of x_t = x, in float64, for data N(MEAN, SPREAD^2)."""
    a, s = rates(process, time)
    data = MEAN + a * SPREAD**2 / (a**2 * SPREAD**2 + s**2) * (x - a * MEAN)
    noise = s / (a**2 * SPREAD**2 + s**2) * (x - a * MEAN)
    return target(process, data, noise)


def predict(process):
    """The best model in JAX: x [B 3], times [B]."""

    def said(x, time):
        a, s = (rate[:, None] for rate in process.rates(time))
        data = MEAN + a * SPREAD**2 / (a**2 * SPREAD**2 + s**2) * (x - a * MEAN)
        noise = s / (a**2 * SPREAD**2 + s**2) * (x - a * MEAN)
        return target(process, data, noise)

    return said


@pytest.mark.parametrize("process", [Flow(), DataFlow(), DDPM(), DDPM(steps=10, last=0.5)])
def test_the_rates_are_those_of_the_papers_and_noise_is_added_by_them(process):
    time = np.linspace(0, 1, 11)
    found = np.stack(process.rates(time), -1)
    np.testing.assert_allclose(found, [rates(process, t) for t in time], rtol=2e-6, atol=1e-6)
    assert found[0].tolist() == [1, 0] and found[-1, 0] < 0.3
    x = jnp.asarray(RNG.normal(size=(11, 2, 3)), jnp.float32)
    drawn = jnp.asarray(RNG.normal(size=x.shape), jnp.float32)
    x_t, told = noised(process, x, drawn, jnp.asarray(time, jnp.float32))
    a, s = (found[:, i, None, None] for i in range(2))
    np.testing.assert_allclose(x_t, a * x + s * drawn, atol=1e-6)
    np.testing.assert_allclose(told, target(process, x, drawn), atol=1e-6)
    # A right answer gives back what was mixed, but where there is no data left.
    data, noise = process.parts(x_t[1:-1], jnp.asarray(time[1:-1], jnp.float32), told[1:-1])
    np.testing.assert_allclose(data, x[1:-1], atol=2e-3)
    np.testing.assert_allclose(noise, drawn[1:-1], atol=1e-4)


def numpy_ddim(process, x, steps, eta, drawn, clip=None):
    """Song et al. 2021, equations 12 and 16, in float64: x before each step and at the end."""
    times, path = np.linspace(1, 0, steps + 1), [x]
    for i, (time, until) in enumerate(zip(times[:-1], times[1:], strict=True)):
        (a, s), (b, _) = rates(process, time), rates(process, until)
        eps = best(process, x, time)
        data = (x - s * eps) / a
        if clip is not None:
            data = np.clip(data, -clip, clip)
            eps = (x - a * data) / s
        new = eta * np.sqrt((1 - b**2) / (1 - a**2)) * np.sqrt(1 - a**2 / b**2)
        x = b * data + np.sqrt(1 - b**2 - new**2) * eps + new * drawn[i]
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize(("eta", "clip"), [(0.0, None), (0.0, 1.0), (0.5, None), (1.0, None)])
def test_ddim_takes_the_steps_of_the_paper(eta, clip):
    process, steps, x = DDPM(), 8, RNG.normal(size=(5, 3))
    key = jax.random.key(3)
    drawn = [np.asarray(jax.random.normal(k, x.shape)) for k in jax.random.split(key, steps)]
    expected = numpy_ddim(process, x, steps, eta, drawn, clip)
    way = DDIM(steps, eta=eta, clip=clip)
    given = dict(process=process, sampler=way, return_path=True)
    call = jax.jit(lambda x, key: sample(predict(process), x, key, **given))
    found, path, _ = call(jnp.asarray(x, jnp.float32), key)
    np.testing.assert_allclose([*path, found], expected, atol=2e-3)


@pytest.mark.parametrize(
    ("process", "sampler"),
    [(Flow(), Euler(400)), (Flow(), DDIM(400)), (DataFlow(), Euler(400)), (DDPM(), DDIM(500))],
)
def test_following_the_best_model_gives_the_known_end_of_each_noise(process, sampler):
    """The way of a Gaussian keeps its quantiles: noise z ends at mean + spread z, here of what x_1 holds."""
    z = RNG.normal(size=(6, 3))
    a, s = rates(process, 1.0)
    scale = np.sqrt(a**2 * SPREAD**2 + s**2)
    x = a * MEAN + scale * z
    found = sample(predict(process), jnp.asarray(x, jnp.float32), process=process, sampler=sampler)
    np.testing.assert_allclose(found, MEAN + SPREAD * z, atol=0.02)


@pytest.mark.slow
def test_ancestral_samples_have_the_mean_and_the_spread_of_the_data():
    process, x = DDPM(), jnp.asarray(RNG.normal(size=(10_000, 3)), jnp.float32)
    way = DDIM(1000, eta=1.0)
    call = jax.jit(lambda x, k: sample(predict(process), x, k, process=process, sampler=way))
    found = np.asarray(call(x, jax.random.key(0)))
    np.testing.assert_allclose(found.mean(0), MEAN, atol=0.03)
    np.testing.assert_allclose(found.std(0), SPREAD, rtol=0.03)
    assert np.abs(np.corrcoef(found[:, 1], np.asarray(x)[:, 1])[0, 1]) < 0.05  # noise anew


def test_ddim_of_a_flow_is_euler():
    x = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
    given = dict(process=Flow())
    one = sample(predict(Flow()), x, sampler=Euler(7), **given)
    np.testing.assert_allclose(one, sample(predict(Flow()), x, sampler=DDIM(7), **given), atol=1e-5)


def test_the_weighted_error_of_the_data_is_that_of_the_velocity_and_early_no_more():
    x, noise, said = jnp.asarray(RNG.normal(size=(3, 4, 3)), jnp.float32)
    time = np.array([0.05, 0.3, 0.6, 1.0])
    x_t, told = noised(DataFlow(), x, noise, jnp.asarray(time, jnp.float32))
    found = DataFlow().weight(jnp.asarray(time)) * np.square(said - told).mean(-1)
    velocity = (np.asarray(x_t, np.float64) - said) / time[:, None]
    expected = np.square(velocity - (noise - x)).mean(-1)
    expected[0] *= (0.05 / 0.3) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for process in (Flow(), DDPM()):
        assert process.weight(time).tolist() == [1, 1, 1, 1]


def test_guidance_0_and_1_are_exactly_one_model_and_beyond_it_goes_on():
    with_words = lambda x, time: x * 3 + time[:, None]  # noqa: E731
    without = lambda x, time: x / 7  # noqa: E731
    x, time = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32), jnp.full(4, 0.3)
    np.testing.assert_array_equal(guided(with_words, without, 0.0)(x, time), without(x, time))
    np.testing.assert_array_equal(guided(with_words, without, 1.0)(x, time), with_words(x, time))
    u, c = np.asarray(without(x, time), np.float64), np.asarray(with_words(x, time), np.float64)
    np.testing.assert_allclose(
        guided(with_words, without, 3.0)(x, time), u + 3 * (c - u), rtol=1e-5
    )

    def refuse(x, time):
        raise AssertionError("the other model is run")

    guided(refuse, without, 0.0)(x, time), guided(with_words, refuse, 1.0)(x, time)


def test_a_sample_is_its_keys_and_its_path_leads_to_it():
    process, x = DDPM(), jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
    draw = functools.partial(
        sample, predict(process), x, process=process, sampler=DDIM(6, eta=1.0), return_path=True
    )
    found, path, times = draw(jax.random.key(1))
    np.testing.assert_array_equal(found, draw(jax.random.key(1))[0])
    assert np.abs(found - draw(jax.random.key(2))[0]).max() > 0.1
    assert path.shape == (6, 4, 3) and times[0] == 1 and times[-1] == pytest.approx(1 / 6)
    np.testing.assert_array_equal(path[0], x)
    rest = jnp.asarray(path[-1])
    said = predict(process)(rest, jnp.full(4, times[-1]))
    data, _ = process.parts(rest, jnp.full(4, times[-1]), said)
    np.testing.assert_allclose(found, data, atol=1e-6)  # the last step draws nothing


def test_a_way_that_a_process_does_not_have_is_refused():
    x = jnp.zeros((2, 3))
    with pytest.raises(
        ValueError, match="a DDPM does not say; expected a Flow, or the sampler DDIM"
    ):
        sample(predict(DDPM()), x, process=DDPM(), sampler=Euler(2))
    with pytest.raises(ValueError, match="eta above 0.*expected a key="):
        sample(predict(DDPM()), x, process=DDPM(), sampler=DDIM(2, eta=1.0))


def test_a_process_and_a_sampler_of_ones_own_are_taken():
    class Square:
        def rates(self, time):
            time = jnp.asarray(time)
            return 1 - time**2, time

        def target(self, x, noise):
            return x

        def parts(self, x_t, time, said):
            a, s = (rate[:, None] for rate in self.rates(time))
            return said, (x_t - a * said) / s

        def weight(self, time):
            return 1.0

    assert isinstance(Square(), diffusion.Process)
    x = jnp.asarray(RNG.normal(size=(2, 3)), jnp.float32)
    sharp = lambda x, time: jnp.full_like(x, 2.0)  # noqa: E731
    found = sample(sharp, x, process=Square(), sampler=DDIM(5))
    np.testing.assert_allclose(found, 2.0, atol=1e-5)
