"""How the bundled models, smollm2's adapter and retaining heads are trained, and the texts they are judged by."""
