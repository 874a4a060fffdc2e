"""Ray, and nothing else imports ray: worker groups, placement, failures."""
