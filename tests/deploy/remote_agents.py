"""Agents on another machine: `python remote_agents.py RELAY KEY FOLDER COUNT`, on plain clients.

While FOLDER/hold exists, they stop in the middle of their conversations.
"""

import json
import sys
import threading
import time
from pathlib import Path

import httpx
import openai

TURNS = 4


def post(url, key, **content):
    """Return what the relay answers, once it is there."""
    headers = {"Authorization": f"Bearer {key}"}
    while True:
        try:
            return httpx.post(url, json=content, headers=headers, timeout=600)
        except httpx.TransportError:
            time.sleep(0.2)


def play(fetched, folder):
    """Let the policy speak a few times; return the reward and when each answer came."""
    messages, times = [*fetched["task"]["messages"]], []
    access = {"base_url": fetched["base_url"], "api_key": fetched["key"]}
    with openai.OpenAI(**access, max_retries=10) as client:
        for turn in range(TURNS):
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            said = answer.choices[0].message.content or ""
            times.append(time.time())
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"more {turn}"},
            ]
            while turn == TURNS // 2 and (folder / "hold").exists():
                (folder / f"held-{fetched['key'][:40]}").touch()
                time.sleep(0.05)
    return sum(map(ord, messages[-2]["content"])) % 7 / 7, times


def work(relay, key, folder, log, lock):
    """Fetch tasks and report results until this process is ended."""
    while True:
        fetched = post(f"{relay}/tasks", key, seconds=5).json()
        if fetched["task"] is None:
            continue
        row = {"prompt_id": fetched["task"]["prompt_id"]}
        try:
            row["reward"], row["times"] = play(fetched, folder)
            report = post(f"{relay}/result", fetched["key"], reward=row["reward"])
            row["status"] = report.status_code
        except Exception as error:  # noqa: BLE001  (it stands in the log)
            row["error"] = repr(error)
        with lock:
            log.write(json.dumps(row) + "\n")
            log.flush()


if __name__ == "__main__":
    _, relay, key, folder, count = sys.argv
    lock = threading.Lock()
    with Path(folder, "agents.jsonl").open("a") as log:
        threads = [
            threading.Thread(target=work, args=(relay, key, Path(folder), log, lock), daemon=True)
            for _ in range(int(count))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
