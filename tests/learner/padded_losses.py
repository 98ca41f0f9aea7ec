"""The objectives once more: token by token in plain Python over padded float64 arrays.

`current` [B, T] is what is differentiated; where the definition stops a gradient, `b.frozen` is
read instead, so that a finite difference in `current` is the gradient that the definition means.
Each returns ℓ [B, T].
"""

from math import exp, log, log1p

import numpy as np


def tokens(b, i):
    return [t for t in range(b.mask.shape[1]) if b.mask[i, t]]


def anchor(b):
    return b.behavior if b.proximal is None else b.proximal


def each_token(function):
    def loss(b, current, **options):
        result = np.zeros_like(b.frozen)
        for i in range(len(b.groups)):
            for t in tokens(b, i):
                result[i, t] = function(b, current, i, t, **options)
        return result

    return loss


def clip(ratio, gain, clip_low, clip_high, dual_clip=None):
    kept = min(max(ratio, 1 - clip_low), 1 + clip_high)
    loss = max(-gain * ratio, -gain * kept)
    return min(loss, -dual_clip * gain) if dual_clip is not None and gain < 0 else loss


def mean_log_ratio(b, values, i):
    here = tokens(b, i)
    return sum(values[i, t] - anchor(b)[i, t] for t in here) / len(here)


@each_token
def reinforce(b, current, i, t):
    return -b.advantages[i, t] * current[i, t]


@each_token
def ppo(b, current, i, t, **clipping):
    return clip(exp(current[i, t] - anchor(b)[i, t]), b.advantages[i, t], **clipping)


@each_token
def cispo(b, current, i, t, cap_low, cap_high):
    ratio = exp(b.frozen[i, t] - anchor(b)[i, t])
    return -min(max(ratio, cap_low), cap_high) * b.advantages[i, t] * current[i, t]


@each_token
def gspo(b, current, i, t, **clipping):
    return clip(exp(mean_log_ratio(b, current, i)), b.advantages[i, t], **clipping)


@each_token
def gspo_token(b, current, i, t, **clipping):
    ratio = exp(mean_log_ratio(b, b.frozen, i)) * exp(current[i, t] - b.frozen[i, t])
    return clip(ratio, b.advantages[i, t], **clipping)


@each_token
def sapo(b, current, i, t, tau_positive, tau_negative):
    gain = b.advantages[i, t]
    tau = tau_positive if gain > 0 else tau_negative
    ratio = exp(current[i, t] - anchor(b)[i, t])
    return -gain * 4 / tau / (1 + exp(-tau * (ratio - 1)))


@each_token
def topr(b, current, i, t, level):
    gain = b.advantages[i, t]
    here = tokens(b, i) if level == "sequence" else [t]
    ratio = exp(sum(b.frozen[i, s] - b.behavior[i, s] for s in here))
    return -(1 if gain >= 0 else min(ratio, 1)) * gain * current[i, t]


@each_token
def kimi(b, current, i, t, tau, variant):
    gain, here = b.advantages[i, t], [t] if variant == "token_sq" else tokens(b, i)
    distance = sum(current[i, s] - b.behavior[i, s] for s in here)
    if variant == "k2":
        return (gain - tau * distance) ** 2
    return -gain * sum(current[i, s] for s in here) + tau / 2 * distance**2


@each_token
def raft(b, current, i, t, keep):
    gain = b.advantages[i, t]
    mates = [j for j in range(len(b.groups)) if b.groups[j] == b.groups[i] and tokens(b, j)]
    gains = [b.advantages[j, tokens(b, j)[0]] for j in mates]
    weight = 1.0 if keep == "positive" else (gain == max(gains)) / gains.count(max(gains))
    return -weight * current[i, t] if gain > 0 else 0.0


@each_token
def decoupled_ppo(b, current, i, t, proximal, fresh, cap, **clipping):
    lag, now, sampled = b.lags[i, t], b.frozen[i, t], b.behavior[i, t]
    share = 1 - 1 / max(lag, 1)
    if proximal == "recompute":
        middle = b.proximal[i, t]
    elif proximal == "detach":
        middle = now
    elif lag <= 0:
        middle = now if fresh == "current" else sampled
    elif proximal == "loglinear":
        middle = sampled + share * (now - sampled)
    else:
        middle = log((1 - share) * exp(sampled) + share * exp(now))
    weight = min(exp(middle - sampled), cap)
    return weight * clip(exp(current[i, t] - middle), b.advantages[i, t], **clipping)


@each_token
def dpo(b, current, i, t, beta, label_smoothing, variant):
    mates = [j for j in range(len(b.groups)) if b.groups[j] == b.groups[i] and tokens(b, j)]
    better = [j for j in mates if b.advantages[j, 0] > 0]
    worse = [j for j in mates if b.advantages[j, 0] < 0]
    if not (better and worse):
        return 0.0

    def distance(j):
        total = sum(current[j, s] - b.reference[j, s] for s in tokens(b, j))
        return total / len(tokens(b, j)) if variant == "ipo" else total

    z = distance(better[0]) - distance(worse[0])
    if variant == "ipo":
        return (z - 1 / (2 * beta)) ** 2
    right, wrong = -log1p(exp(-beta * z)), -log1p(exp(beta * z))
    return -(1 - label_smoothing) * right - label_smoothing * wrong


@each_token
def kl(b, current, i, t, form, cap=5.0):
    d = current[i, t] - b.reference[i, t]
    ratio = exp(current[i, t] - b.behavior[i, t])
    values = {"k1": d, "k2": d**2 / 2, "k3": exp(-d) - 1 + d}
    if form == "weighted_k2":
        frozen = b.frozen[i, t] - b.reference[i, t]
        k3 = exp(-frozen) - 1 + frozen
        weight = min(exp(b.frozen[i, t] - b.behavior[i, t]), cap)
        return weight * (k3 + d**2 / 2 - frozen**2 / 2)
    return ratio * values[form[-2:]] if form.startswith("ratio") else values[form]


@each_token
def positive_nll(b, current, i, t, total, threshold):
    return -current[i, t] / total if b.rewards[i, t] > threshold else 0.0


dapo = ppo


def finite_difference(loss, b, weights, step=1e-6, **options):
    """∂ Σ weights·ℓ / ∂ current by central differences, [N]; weights are [B, T]."""
    result = []
    for place in b.places:
        ends = []
        for sign in (1, -1):
            current = b.frozen.copy()
            current[place] += sign * step
            ends.append(np.nansum(weights * loss(b, current, **options)))
        result.append((ends[0] - ends[1]) / (2 * step))
    return np.array(result)
