"""The limit of open files: each bucket of the weights is one, in every process that holds it."""

import resource

MOST = 1 << 16
"""Many times the buckets of two versions, of which a model of 70 billion parameters has 1,124."""
RAISE_LIMIT = (
    "raise the limit (LimitNOFILE= of systemd, /etc/security/limits.conf, "
    "--ulimit nofile= of docker)"
)


def allow_open_files() -> int:
    """Let this process and its children open MOST files, or up to the hard limit; return which."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    allowed = MOST if hard == unlimited else min(hard, MOST)
    if soft == unlimited or soft >= allowed:
        return MOST if soft == unlimited else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
