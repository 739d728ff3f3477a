"""Why a pod was chosen: decisions that are kept with all that they were made of, and what came of them."""
