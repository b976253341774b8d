"""A language model small enough to search completely: the next token depends on the last one."""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

PAD, BOS, EOS = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Times:
    """How many tokens were read, [] or [B]: all that the next one depends on, but for the last one."""

    read: jax.Array

    def select(self, parents):
        return self

    def rewind(self, lengths):
        return replace(self, read=lengths)


class Markov:
    """``log_p`` [T, V, V]: at step t, after token i, the log-probability of token j.

    Padding and the beginning of a sentence are never generated.
    """

    def __init__(self, seed, vocab=6, length=5, sharpness=1.0, eos_bonus=0.0):
        rng = np.random.default_rng(seed)
        logits = sharpness * rng.normal(size=(length, vocab, vocab))
        logits[..., EOS] += eos_bonus
        logits[..., [PAD, BOS]] = -1e4
        self.log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self.length, self.vocab = length, vocab
        self.calls = []

    def states(self, batch, num_beams):
        """Nothing was read."""
        return Times(jnp.zeros((), jnp.int32))

    def decode_step(self, tokens, states):
        """As a model's; ``calls`` counts how often it ran."""
        jax.debug.callback(lambda i: self.calls.append(int(i)), states.read)
        return self.table_step(tokens, states)

    def times(self, tokens, states):
        """The steps of new tokens [B J T], no later than the last."""
        times = states.read[..., None, None] + jnp.arange(tokens.shape[-1])
        return jnp.minimum(times, self.length - 1)

    def table_step(self, tokens, states):
        """The same without counting, for any number of tokens at once."""
        times = self.times(tokens, states)
        states = replace(states, read=states.read + tokens.shape[-1])
        log_p = jnp.asarray(self.log_p, jnp.float32)
        if log_p.ndim == 3:
            return log_p[times, tokens], states
        return log_p[jnp.arange(len(log_p))[:, None, None], times, tokens], states

    @classmethod
    def rows(cls, models):
        """One model whose row b is that of ``models[b]``: one program searches them all."""
        together = cls(0, models[0].vocab, models[0].length)
        together.log_p = np.stack([model.log_p for model in models])
        return together

    def all_hypotheses(self):
        """Every finished sequence, and every unfinished one of full length, with its log p."""
        words = range(EOS + 1, self.vocab)
        for n in range(1, self.length + 1):
            for middle in itertools.product(words, repeat=n - 1):
                for last in (EOS, *words) if n == self.length else (EOS,):
                    tokens = (*middle, last)
                    yield tokens, self.score(tokens)

    def score(self, tokens):
        """log p of a sequence, in float64."""
        pairs = zip((BOS, *tokens[:-1]), tokens, strict=True)
        return sum(self.log_p[t, i, j] for t, (i, j) in enumerate(pairs))


def check_frequencies(counts, expected):
    """A chi-square test of outcomes against their expected numbers, the rare ones taken together."""
    counts, expected = np.asarray(counts), np.asarray(expected)
    assert not counts[expected == 0].any(), "an outcome came that cannot come"
    often = expected > 5
    counts, expected = (np.append(x[often], x[~often].sum()) for x in (counts, expected))
    some = expected > 0
    assert stats.chisquare(counts[some], expected[some]).pvalue > 1e-3


def penalised(score, length, alpha):
    """GNMT's length penalty."""
    return score / ((5 + length) / 6) ** alpha


def plain_beam_search(next_log_p, beams, length, alpha):
    """The J best hypotheses of ``plain_finished``."""
    return plain_finished(next_log_p, beams, length, alpha)[:beams]


def plain_finished(next_log_p, beams, length, alpha):
    """Beam search over Python lists, without early stop: all [(tokens, score)], best first.

    ``next_log_p`` gives log-probabilities [V] of the token after a tuple of tokens. Of the 2 J best
    continuations those that end are kept aside and the J best others live on.
    """
    live, done = [((), 0.0)], []
    for step in range(length):
        children = [
            ((*tokens, token), score + log_p)
            for tokens, score in live
            for token, log_p in enumerate(next_log_p(tokens))
        ]
        children.sort(key=lambda child: -child[1])
        children = children[: 2 * beams]
        done += [child for child in children if child[0][-1] == EOS]
        live = [child for child in children if child[0][-1] != EOS]
        live = live if step == length - 1 else live[:beams]  # all that stand at the limit are done
    found = [(tokens, penalised(s, len(tokens), alpha)) for tokens, s in done + live]
    return sorted(found, key=lambda pair: -pair[1])


def plain_groups(next_log_p, groups, size, diversity, length, alpha):
    """Diverse beam search over lists: [(tokens, score)] of all groups, best first."""
    live = [[((), 0.0)] for _ in range(groups)]
    done = [[] for _ in range(groups)]
    for step in range(length):
        taken = np.zeros(len(next_log_p(())))
        for g in range(groups):
            children = [
                ((*tokens, t), score + p, score + p - diversity * taken[t])
                for tokens, score in live[g]
                for t, p in enumerate(next_log_p(tokens))
            ]
            children.sort(key=lambda child: -child[2])
            children = [child[:2] for child in children[: 2 * size]]
            ended = [c for c in children if c[0][-1] == EOS or step == length - 1]
            ended = [(tokens, penalised(s, len(tokens), alpha)) for tokens, s in ended]
            done[g] = sorted(done[g] + ended, key=lambda c: -c[1])[:size]
            going = [c for c in children if c[0][-1] != EOS]
            live[g] = sorted(going, key=lambda c: -c[1])[:size]
            for tokens, _ in live[g]:
                taken[tokens[-1]] += 1
    return sorted(sum(done, []), key=lambda c: -c[1])


def log_softmax(scores):
    return scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()


def plain_greedy(log_p, length):
    """Returns the tokens of the likeliest steps, by a loop; ``log_p(tokens)`` are those of the next one."""
    tokens = ()
    while len(tokens) < length and tokens[-1:] != (EOS,):
        tokens = (*tokens, int(log_p(tokens).argmax()))
    return tokens


def texts(found, row, count=1):
    """Returns the tokens of the best hypotheses of a row."""
    return [tuple(found.tokens[row, j, : found.lengths[row, j]].tolist()) for j in range(count)]
