"""The work: prepares and evaluates models, on this machine or on Ray. Knows no database, no MLflow, no holdout label in a child."""
