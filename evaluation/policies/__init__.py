"""Who is compared: models here, models behind an endpoint, outputs that were saved."""
