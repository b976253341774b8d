"""Beam search against exhaustive search, plain Python and transformers, under all its rules."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.decode import Capture, beam_search, constraints, penalties, stopping
from tests.decode import markov
from tests.decode.markov import BOS, EOS, Markov, Times
from tests.peers import peer


def search(model, step=None, *, num_beams, batch=1, **options):
    """Hypotheses of a table model, jitted."""
    options = dict(max_new_tokens=model.length, batch=batch, num_beams=num_beams) | options
    call = jax.jit(lambda s: beam_search(step or model.table_step, s, **options))
    return jax.device_get(call(model.states(batch, num_beams)))


def read(found, row=0):
    tokens, lengths = np.asarray(found.tokens[row]), np.asarray(found.lengths[row])
    for sequence, n in zip(tokens, lengths, strict=True):
        assert not sequence[n:].any() and sequence[:n].all()
    return [
        (tuple(int(t) for t in sequence[:n]), float(score))
        for sequence, n, score in zip(tokens, lengths, np.asarray(found.scores[row]), strict=True)
    ]


def same(found, row, expected):
    """The hypotheses of a row are these [(tokens, score)]."""
    assert [tokens for tokens, _ in read(found, row)] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose(found.scores[row], [s for _, s in expected], rtol=1e-4)


def table_row(model, tokens):
    return model.log_p[len(tokens), (BOS, *tokens)[-1]]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_enough_beams_find_what_exhaustive_search_finds(seed, alpha):
    model = Markov(seed, vocab=5, length=4)
    every = [(t, markov.penalised(s, len(t), alpha)) for t, s in model.all_hypotheses()]
    every.sort(key=lambda pair: -pair[1])
    same(search(model, num_beams=16, length_penalty=alpha).best(5), 0, every[:5])


@pytest.mark.parametrize(
    ("num_beams", "alpha", "bonus"), [(1, 0.6, 0), (2, 0.0, 0), (3, 1.0, 0), (2, 0.6, -1e4)]
)
@pytest.mark.parametrize("seed", range(3))
def test_few_beams_find_what_a_plain_beam_search_finds(seed, num_beams, alpha, bonus):
    model = Markov(seed, vocab=8, length=6, eos_bonus=bonus)
    found = search(model, num_beams=num_beams, length_penalty=alpha)
    next_log_p = functools.partial(table_row, model)
    same(found, 0, markov.plain_beam_search(next_log_p, num_beams, model.length, alpha))


def test_the_search_stops_early_and_changes_nothing_by_it():
    model = Markov(0, vocab=8, length=30, eos_bonus=4.0)
    found = search(model, model.decode_step, num_beams=3)
    jax.effects_barrier()
    same(found, 0, markov.plain_beam_search(functools.partial(table_row, model), 3, 30, 0.6))
    assert 3 < len(model.calls) < 30


def generated_by_transformers(model, num_beams, alpha, early, prefix=(BOS,), **options):
    """[(tokens, score)] of ``generate`` over the same table, best first."""
    torch = peer("torch")
    transformers = peer("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    table = torch.tensor(model.log_p).float()

    class Config(transformers.PretrainedConfig):
        model_type = "table"

    class Table(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.post_init()

        def forward(self, input_ids, **unused):
            times = torch.arange(input_ids.shape[1]).clamp(max=len(table) - 1)
            return CausalLMOutput(logits=table[times, input_ids])

    config = Config(vocab_size=model.vocab, num_hidden_layers=1)
    found = Table(config).generate(
        torch.tensor([prefix]),
        attention_mask=torch.ones(1, len(prefix), dtype=torch.long),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        length_penalty=alpha,
        early_stopping=early,
        max_new_tokens=model.length,
        pad_token_id=0,
        bos_token_id=BOS,
        eos_token_id=EOS,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    sequences = found.sequences[:, len(prefix) :].tolist()
    scores = found.sequences_scores.tolist()
    return [(cut(tokens), score) for tokens, score in zip(sequences, scores, strict=True)]


def cut(tokens):
    """Through the end: transformers fills up with it when padding is 0."""
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize(
    ("num_beams", "alpha", "bonus"), [(3, 1.0, 1.5), (4, 0.0, 0.5), (2, 2.0, 3.0), (4, -1.0, 1.0)]
)
def test_the_rule_of_transformers_finds_what_transformers_finds(num_beams, alpha, bonus, early):
    models = [Markov(seed, vocab=9, length=10, eos_bonus=bonus) for seed in range(5)]
    found = search(
        Markov.rows(models),
        batch=5,
        num_beams=num_beams,
        length_penalty=penalties.power(alpha),
        stopping=stopping.transformers(early, alpha),
    )
    for row, model in enumerate(models):
        same(found, row, generated_by_transformers(model, num_beams, alpha, early))


def test_constraints_and_a_prefix_find_what_transformers_finds():
    prefix = (BOS, 4, 3)
    options = dict(length_penalty=penalties.power(1.0), stopping=stopping.transformers())
    models = [Markov(seed, vocab=9, length=8, eos_bonus=1.0) for seed in range(5)]
    found = search(
        Markov.rows(models),
        batch=5,
        num_beams=3,
        prefix=prefix,
        processors=[
            constraints.no_repeat_ngram(2),
            constraints.min_new_tokens(3, EOS),
            constraints.ban(5),
            constraints.max_new_tokens(8, EOS),
        ],
        **options,
    )
    for row, model in enumerate(models):
        expected = generated_by_transformers(
            model, 3, 1.0, False, prefix, no_repeat_ngram_size=2, min_new_tokens=3,
            suppress_tokens=[5], forced_eos_token_id=EOS,
        )  # fmt: skip
        same(found, row, expected)


def test_every_row_has_its_own_limit():
    model = Markov(2, vocab=7, length=6, eos_bonus=-1.0)
    limits = [6, 0, 3, 1]
    found = search(model, num_beams=3, batch=4, limits=jnp.array(limits))
    for row, limit in enumerate(limits):
        if limit == 0:
            assert not found.tokens[row].any() and np.all(found.scores[row] == -np.inf)
            continue
        next_log_p = functools.partial(table_row, model)
        same(found, row, markov.plain_beam_search(next_log_p, 3, limit, 0.6))


def test_the_best_of_n_are_the_first():
    found = search(Markov(1, vocab=8), num_beams=5)
    first = found.best(2)
    assert first.tokens.shape[1] == first.scores.shape[1] == 2
    np.testing.assert_array_equal(first.tokens, found.tokens[:, :2])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("groups", "size", "alpha"), [(2, 2, 0.0), (3, 1, 0.0), (2, 2, 1.0), (3, 1, 2.5)]
)
def test_groups_find_what_plain_diverse_beam_search_finds(groups, size, alpha):
    for seed in range(3):
        model = Markov(seed, vocab=8, length=5)
        options = dict(num_beam_groups=groups, diversity_penalty=0.7, length_penalty=alpha)
        found = search(model, num_beams=groups * size, **options)
        log_p = functools.partial(table_row, model)
        expected = markov.plain_groups(log_p, groups, size, 0.7, 5, alpha)
        same(found, 0, expected)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reading(Times):
    """States of a model with a source."""

    source_valid: jax.Array


class Reader(Markov):
    """A model that attends too: ``attention`` [T V S], at step t after token i."""

    def __init__(self, seed, sources=4, **shape):
        super().__init__(seed, **shape)
        rng = np.random.default_rng(seed + 100)
        self.attention = rng.dirichlet(np.full(sources, 0.4), (self.length, self.vocab))
        self.valid = np.arange(sources) < sources - 1

    def states(self, batch, num_beams):
        return Reading(
            jnp.zeros((), jnp.int32), jnp.broadcast_to(self.valid, (batch, len(self.valid)))
        )

    def table_step(self, tokens, states, return_weights=False):
        seen = jnp.asarray(self.attention, jnp.float32)[self.times(tokens, states), tokens]
        logits, states = super().table_step(tokens, states)
        weights = jnp.stack([seen, 1 - seen], axis=2)[None]  # of one layer and two heads
        return (logits, states, weights) if return_weights else (logits, states)

    def cost(self, tokens, beta):
        """Of a finished hypothesis, by the paper's equation 14."""
        read = zip(range(len(tokens)), (BOS, *tokens[:-1]), strict=True)
        covered = sum(self.attention[t, i] for t, i in read)
        return beta * np.log(np.minimum(covered, 1.0))[self.valid].sum()


@pytest.mark.parametrize(("beta", "alpha"), [(0.2, 0.0), (1.0, 0.6), (5.0, 1.0)])
def test_coverage_finds_what_a_plain_search_with_its_cost_finds(beta, alpha):
    coverage = penalties.Coverage(beta, Capture(layers=(0,), heads=(0,)))
    moved = 0
    for seed in range(3):
        model = Reader(seed, vocab=8, length=5, eos_bonus=0.5)
        found = search(model, num_beams=3, coverage=coverage, length_penalty=alpha)
        next_log_p = functools.partial(table_row, model)
        every = markov.plain_finished(next_log_p, 3, 5, alpha)
        costly = [(tokens, score + model.cost(tokens, beta)) for tokens, score in every]
        same(found, 0, sorted(costly, key=lambda pair: -pair[1])[:3])
        moved += [tokens for tokens, _ in every[:3]] != [tokens for tokens, _ in read(found)]
    assert moved, "coverage should matter"


@pytest.mark.parametrize(("num_beams", "groups"), [(0, 1), (3, 2), (2, 0)])
def test_beams_that_do_not_divide_into_groups_are_refused(num_beams, groups):
    with pytest.raises(ValueError, match="expected a multiple of the groups"):
        search(Markov(0), num_beams=num_beams, num_beam_groups=groups)
