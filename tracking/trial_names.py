"""The tracking URI with which the plain MLflow API inside a trial finds the trial's own run.

What must not live here: anything that imports mlflow.
"""

SCHEME = "gradsweep-trial"
ADDRESS = f"{SCHEME}://run"
