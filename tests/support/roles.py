"""Users of the test servers: one for each role, who may do what its policy says below one prefix."""

from __future__ import annotations

import json
from typing import Any

from archive.store.policies import OBJECT_ACTIONS, policy
from tests.support import servers

ROLES = tuple(OBJECT_ACTIONS)
ROLES_BUCKET = "policies"
BELOW = f"s3://{ROLES_BUCKET}/runs"
APPENDER = "appender"  # a writer that only adds; known to SeaweedFS
POLICIES = {role: policy(role, BELOW) for role in ROLES} | {APPENDER: policy("writer", BELOW, append_only=True)}


def users_of_moto(endpoint: str) -> dict[str, dict[str, Any]]:
    """Make the users; role -> options of whoever has it. SeaweedFS is told of its own when it is started."""
    import botocore.session

    client = botocore.session.Session().create_client(
        "iam", endpoint_url=endpoint, aws_access_key_id="k", aws_secret_access_key="s", region_name=servers.REGION
    )
    found = {role: _user_of_moto(client, role, endpoint) for role in ROLES}
    client.close()
    return found


def _user_of_moto(client: Any, role: str, endpoint: str) -> dict[str, Any]:
    client.create_user(UserName=role)
    client.put_user_policy(UserName=role, PolicyName="p", PolicyDocument=json.dumps(POLICIES[role]))
    made = client.create_access_key(UserName=role)["AccessKey"]
    return servers.s3fs_options(endpoint) | {"key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}
