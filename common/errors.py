"""The errors this package raises on purpose: each message says what was wrong, the value, and the remedy."""


class MAGRPOError(Exception):
    """Base of every error that is raised on purpose; its text is meant for the person who started the run."""


class ConfigurationError(MAGRPOError, ValueError):
    """An argument or a configuration field has a value that cannot work."""


class DataError(MAGRPOError, ValueError):
    """A row of the data set cannot become a prompt."""


class ModelError(MAGRPOError, ValueError):
    """A model or tokenizer cannot be loaded, or does not fit the others."""


class RewardError(MAGRPOError):
    """The reward function or the reward processor failed, or returned something that is not one number each."""


class ResourceError(MAGRPOError):
    """The machine or cluster does not have what the run asks for."""


class ActorError(MAGRPOError, RuntimeError):
    """A rollout worker or the learner died, or took longer than its limit."""


class RolloutError(MAGRPOError, RuntimeError):
    """An engine does not start, or fails to generate."""


class WeightTransferError(RolloutError):
    """An engine holds other weights than the ones it was asked to use."""


class LearnerError(MAGRPOError, RuntimeError):
    """The update cannot be made: a number is not finite, or the engines' log-probs are not the learner's."""


def shown(value: object, limit: int = 200) -> str:
    """A value as an error message shows it: its `repr`, cut in the middle where it is long."""
    text = repr(value)
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"
