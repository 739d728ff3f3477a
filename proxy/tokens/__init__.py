"""Token ids of prompts as engines make them: here, or asked for."""
