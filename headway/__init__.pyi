from deploy.api import InputError as InputError
from deploy.api import RunFailed as RunFailed
from deploy.api import RunResults as RunResults
from deploy.api import TrainingRun as TrainingRun
from deploy.api import results as results
from deploy.api import resume as resume
from deploy.api import run as run
