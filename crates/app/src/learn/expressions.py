"""Whole numbers that depend on others, written as expressions: found from values at several points, checked at all of them."""

import itertools
from fractions import Fraction
from functools import reduce


def number(value):
    """A leaf of a config as a number, or nothing."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float) and value == value and abs(value) < 1e12:
        return Fraction(repr(value))
    return None


def product(numbers):
    return reduce(lambda a, b: a * b, numbers, Fraction(1))


class Term:
    """A product of names and of quotients rounded down, to a power."""

    def __init__(self, up, quotients=(), power=1):
        self.up, self.quotients, self.power = tuple(up), tuple(quotients), power

    def value(self, env):
        result = product(env[name] for name in self.up)
        for above, below in self.quotients:
            if env[below] == 0:
                return None
            result *= env[above] // env[below]
        return result**self.power

    def text(self, coefficient):
        parts = [*self.up, *(f"({above}/{below})" for above, below in self.quotients)]
        if self.power > 1:
            parts = [(parts[0] if len(parts) == 1 else "(" + "*".join(parts) + ")") + f"^{self.power}"]
        if coefficient.numerator != 1:
            parts.insert(0, str(coefficient.numerator))
        return "*".join(parts) + (f"/{coefficient.denominator}" if coefficient.denominator != 1 else "")

    def cost(self):
        return 1 + len(self.up) + 1.5 * len(self.quotients) + (self.power - 1) * 0.5


def partitions(items):
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        for place, block in enumerate(smaller):
            yield smaller[:place] + [[first, *block]] + smaller[place + 1 :]
        yield [[first], *smaller]


def terms_of(block):
    """The ways in which a few names can be multiplied and divided."""
    for power in (1, 2):
        yield Term(block, (), power)
    for above, below in itertools.permutations(block, 2):
        rest = [name for name in block if name not in (above, below)]
        yield Term(rest, [(above, below)])
        yield Term([below, *rest], [(above, below)])
        yield Term(rest, [(above, below)], 2)
        for third, fourth in itertools.permutations(rest, 2):
            if above < third:
                yield Term([name for name in rest if name not in (third, fourth)], [(above, below), (third, fourth)])


def solve(columns, values):
    """Rational coefficients of the columns that give the values at every point, or nothing."""
    n = len(columns)
    rows = [[column[point] for column in columns] + [values[point]] for point in range(len(values))]
    rank = 0
    for column in range(n):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][column] != 0), None)
        if pivot is None:
            return None
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        head = rows[rank][column]
        rows[rank] = [x / head for x in rows[rank]]
        for r in range(len(rows)):
            if r != rank and rows[r][column] != 0:
                factor = rows[r][column]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[rank])]
        rank += 1
    if any(row[-1] != 0 for row in rows[rank:]):
        return None
    return [rows[k][-1] for k in range(n)]


CHEAP = {Fraction(1): 0, Fraction(2): 0.5, Fraction(3): 0.7, Fraction(4): 0.6, Fraction(1, 2): 0.8, Fraction(1, 4): 1, Fraction(8): 1,
         Fraction(6): 1.2, Fraction(5): 1.5, Fraction(16): 1.5, Fraction(1, 8): 1.5, Fraction(1, 3): 1.5, Fraction(2, 3): 1.5}


def cost_of(terms, coefficients, constant):
    """How far-fetched a sum is: the simplest that holds at all points is believed."""
    cost = sum(term.cost() for term in terms)
    for c in coefficients:
        if c == 0 or abs(c.numerator) > 4096 or c.denominator > 8:
            return None
        cost += CHEAP.get(abs(c), 3) + (2 if c < 0 else 0)
    if constant != 0:
        cost += 1 if abs(constant) <= 8 else 3
    return cost


def write(terms, coefficients, constant):
    parts = [(c > 0, term.text(abs(c))) for term, c in zip(terms, coefficients)]
    if constant != 0:
        parts.append((constant > 0, str(abs(constant))))
    parts.sort(key=lambda part: not part[0])
    text = ""
    for positive, part in parts:
        text += (("+" if text else "") if positive else "-") + part
    return text


def sums(values, envs, names):
    """Sums of products of all these names that have these values, with their cost."""
    points = len({tuple(env[name] for name in names) for env in envs})
    for blocks in partitions(list(names)):
        for terms in itertools.product(*(list(terms_of(block)) for block in blocks)):
            columns = [[term.value(env) for env in envs] for term in terms]
            if any(x is None for column in columns for x in column):
                continue
            # More points than unknowns, or the points prove nothing.
            for constant in (0, 1):
                if len(terms) + constant >= points:
                    continue
                found = solve([*columns, [Fraction(1)] * len(values)] if constant else columns, values)
                if found:
                    c = found[-1] if constant else Fraction(0)
                    coefficients = found[: len(terms)]
                    cost = cost_of(terms, coefficients, c) if c.denominator == 1 else None
                    if cost is not None:
                        yield cost, write(terms, coefficients, c)
                    break


def fit(values, envs, names):
    """The simplest expression in some of `names` that has these values at these points, or nothing."""
    values = [Fraction(value) for value in values]
    if len(set(values)) == 1:
        return str(values[0].numerator)
    best = None
    for count in range(1, min(len(names), 5) + 1):
        # A name costs two at the least.
        if best and best[0] <= 2 * count:
            break
        for chosen in itertools.combinations(sorted(names), count):
            for found in sums(values, envs, chosen):
                if best is None or found < best:
                    best = found
            if count > 1 and best is None:
                for factor in chosen:
                    rest = [name for name in chosen if name != factor]
                    if any(env[factor] == 0 or value % env[factor] for env, value in zip(envs, values)):
                        continue
                    scaled = [value / env[factor] for env, value in zip(envs, values)]
                    for cost, text in sums(scaled, envs, rest):
                        if best is None or cost + 2 < best[0]:
                            best = (cost + 2, f"{factor}*({text})")
    return best[1] if best else windows(values, envs, names)


def windows(values, envs, names):
    """A product of `(name+shift)/step`, rounded down, one for each name, perhaps with a constant beside it: what strides leave."""
    base = envs[0]
    for beside in (0, 1, 2):
        own = [value - beside for value in values]
        if own[0] <= 0:
            continue
        choices = []
        for name in names:
            alone = [(env[name], value) for env, value in zip(envs, own) if all(env[n] == base[n] for n in names if n != name)]
            if any(value != own[0] for _, value in alone):
                choices.append([(name, *found) for found in steps(alone, base[name])])
        for factors in itertools.product(*choices) if choices else ():
            worth = lambda env: product((env[n] + shift) // step for n, shift, step in factors)
            scale = own[0] / worth(base)
            if scale.denominator == 1 and all(scale * worth(env) == value for env, value in zip(envs, own)):
                parts = [f"(({n}{f'+{shift}' if shift else ''})/{step})" if step > 1 else n for n, shift, step in factors]
                text = "*".join(([str(scale.numerator)] if scale != 1 else []) + parts)
                return text + (f"+{beside}" if beside else "")
    return None


def steps(alone, start):
    """Shifts and steps with which values are in proportion to `(size+shift)/step`, the smallest steps first."""
    for step in (1, 2, 4, 8, 14, 16, 32, 64, 3, 5, 6, 7, 10, 12, 20, 24, 28, 40, 48, 56, 80, 96, 112, 128, 160, 320):
        # Rounded down or up, as most are.
        for shift in dict.fromkeys((0, step - 1, *range(step))):
            at = (start + shift) // step
            if at and alone[0][1] % at == 0 and all(value * at == alone[0][1] * ((size + shift) // step) for size, value in alone):
                yield shift, step
                break
