"""Stage 3: samples of the SFT policy, put to labelers."""
