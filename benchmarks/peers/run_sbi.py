"""Neural posterior estimation by the package sbi for agreement.py, in sbi's environment.

python benchmarks/peers/run_sbi.py FEATURES.npz ANSWER.npz SAMPLES
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from sbi.inference import NPE
from sbi.utils import BoxUniform


def main() -> None:
    """Trains on features and parameters, and writes samples for the mock."""
    features, answer, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(1)
    data = {name: torch.tensor(x, dtype=torch.float32) for name, x in np.load(features).items()}
    prior = BoxUniform(data["low"], data["high"])
    theta = torch.cat([data["train_truth"], data["validation_truth"]])
    x = torch.cat([data["train_features"], data["validation_features"]])
    inference = NPE(prior=prior, density_estimator="nsf")
    estimator = inference.append_simulations(theta, x).train()
    posterior = inference.build_posterior(estimator)
    samples = posterior.sample((count,), x=data["observed"], show_progress_bars=False)
    volume = torch.log(data["high"] - data["low"]).sum()
    with torch.no_grad():
        logs = estimator.log_prob(data["test_truth"][None], condition=data["test_features"])[0]
    gain = (logs + volume).numpy()
    np.savez(answer, samples=samples.numpy(), gain=gain)
    print(json.dumps({"mean": samples.mean(0).tolist(), "width": samples.std(0).tolist()}))


if __name__ == "__main__":
    main()
