"""A small competition of two tasks, as its definition has it; rounds_made.py plays it without models."""

DEFINITION = """\
schema = 1
slug = "marbles"
title = "Marbles in two respects"
licence = "CC0-1.0"
contact = "organizers@example.org"
data_is_public = true

[round]
name = "2027-1"
grace = "60s"
objection_window = "0s"
publish = "manual"
holdout_after = "public"
audits = 0

[custody]
threshold = 2
custodians = ["custodian-a", "custodian-b", "custodian-c"]

[submission]
kinds = ["hf-causal-lm"]
architectures = ["llama"]
max_parameters = 1_000_000
max_bytes = 20_000_000
per_entrant = { total = 5, per_day = 5, day = "UTC" }
weights_after = ["publish", "auditor", "delete"]

[[tasks]]
name = "tint"
kind = "choice"
prompt = "{{ input }}"
choices = ["red", "green", "blue"]
metric = "accuracy"
chance = 0.333

[[tasks]]
name = "size"
kind = "choice"
prompt = "{{ input }}"
choices = ["small", "large"]
metric = "accuracy"
chance = 0.5

[preparation]
method = "full"
epochs = 6
global_batch = 32
max_length = 32
optimizer = { name = "adamw", beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01 }
schedule = { name = "linear", warmup_steps = 10, final = 0.1 }
clip = 1.0
lr_grid = [2e-3, 5e-3]
selection = { metric = "nll", seed = 0, candidates = ["base", "last"] }
seeds = [11, 12, 13]
loss = "completion"
dtype = "float32"
determinism = "D1"
threads = 1
diverged = "base"

[ranking]
aggregate = "mean"
missing = "worst"
ties = { method = "shared", tolerance = 0.0 }
interval = { kind = "simultaneous", level = 0.95, draws = 100, seed = 1 }
cluster = "cluster"
baselines = ["majority", "untrained"]

[compute]
hardware = "cpu"
max_gpu_hours = 0
order_seed = "from-log"

[isolation]
memory = "2GiB"
wall = "30m"

[logs]
entrants_see = "tail:200"
"""
