"""The client of pgqueuer, driven by the program: a request a line comes in, an answer a line goes out.

usage: pgqueuer_peer.py DATABASE_URL
"""

import asyncio
import json
import logging
import random
import sys
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer, Queries

BATCH = 500
SENDERS = 64
ENTRYPOINT = "bench"
TABLES = "pgqueuer, pgqueuer_log, pgqueuer_statistics"

letters = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=10_000))


def payload(number, size):
    start = number % 5_000
    return f'{{"n":"{number:010}","pad":"{letters[start:start + size - 28]}"}}'.encode()


async def install(queries, _request):
    await queries[0].install()


async def fresh(queries, _request):
    await queries[0].driver.execute(f"TRUNCATE {TABLES}")


async def produce(queries, request):
    first, end, size = request["first"], request["end"], request["bytes"]
    middle = (first + end) // 2

    async def part(queries, start, stop):
        for batch in range(start, stop, BATCH):
            numbers = range(batch, min(batch + BATCH, stop))
            payloads = [payload(number, size) for number in numbers]
            await queries.enqueue([ENTRYPOINT] * len(payloads), payloads, [0] * len(payloads))

    await asyncio.gather(part(queries[0], first, middle), part(queries[1], middle, end))


async def send(queries, request):
    numbers = iter(range(request["first"], request["end"]))

    async def sender(queries):
        for number in numbers:
            await queries.enqueue(ENTRYPOINT, payload(number, request["bytes"]))

    await asyncio.gather(*map(sender, queries))


async def consume(url, request):
    wanted = set(range(request["first"], request["end"]))
    repeated = 0
    connection = await asyncpg.connect(url)
    worker = PgQueuer.from_asyncpg_connection(connection)

    @worker.entrypoint(ENTRYPOINT)
    async def handle(job):
        nonlocal repeated
        number = int(job.payload[6:16])
        if number in wanted:
            wanted.discard(number)
            if not wanted:
                worker.shutdown.set()
        else:
            repeated += 1

    # It logs and deletes what was done before it returns.
    await worker.run(dequeue_timeout=timedelta(seconds=1), batch_size=BATCH)
    if not connection.is_closed():
        await connection.close()
    return {"missing": sorted(wanted), "repeated": repeated}


async def main(url):
    queries = []
    work = {"install": install, "fresh": fresh, "produce": produce, "send": send}
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        if request["do"] == "consume":
            answer = await consume(url, request)
        else:
            # Those that produce have their connections before anything is measured.
            while len(queries) < SENDERS:
                queries.append(Queries.from_asyncpg_connection(await asyncpg.connect(url)))
            answer = await work[request["do"]](queries, request) or {}
        print(json.dumps(answer), flush=True)


logging.basicConfig(level=logging.ERROR)
uvloop.run(main(sys.argv[1]))
