"""Seeds of requests: a pure function of where a completion stands in the run, never of who generates it."""

import numpy as np


def request_seed(run_seed: int, rollout: int, prompt: int, agent: int, generation: int) -> int:
    """The seed of one completion, in [0, 2**63).

    Args:
        run_seed: the seed of the run.
        rollout: how many rollouts came before this one.
        prompt, agent, generation: the completion's place in the rollout.
    """
    words = np.random.SeedSequence([run_seed, rollout, prompt, agent, generation]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
