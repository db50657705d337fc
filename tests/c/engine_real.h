/* SPDX-License-Identifier: Apache-2.0 */
/* What tests of an engine with threads share: chance, pauses, one request, a backup, a donor. */
#ifndef ISW_TEST_ENGINE_REAL_H
#define ISW_TEST_ENGINE_REAL_H

#include <fcntl.h>
#include <semaphore.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "engine/request.h"
#include "ticket.h"
#include "util/util.h"

#define REAL_WAIT_MS 120000u

static inline uint64_t draw(uint64_t *random) /* xorshift64* */
{
	*random ^= *random >> 12;
	*random ^= *random << 25;
	*random ^= *random >> 27;
	return *random * 2685821657736338717ull;
}

static inline uint32_t below(uint64_t *random, uint32_t limit)
{
	return (uint32_t)((draw(random) >> 33) % limit);
}

static inline void pause_us(uint32_t us)
{
	const struct timespec time = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};

	nanosleep(&time, NULL);
}

static inline void pause_ms(uint32_t ms)
{
	pause_us(ms * 1000);
}

/* ------------------------------------------------------------- one request at a time */

struct asked {
	struct iswi_req req;
	sem_t ended;
	int error;
};

static inline void asked_done(struct iswi_req *req, int error)
{
	struct asked *a = ISWI_CONTAINER(req, struct asked, req);

	a->error = error;
	sem_post(&a->ended);
}

static inline void ask(isw_engine *e, struct asked *a, enum iswi_req_op op, uint64_t page,
		       uint32_t pages, void *data)
{
	a->req = (struct iswi_req){
		.op = op,
		.offset = page * ISW_PAGE_BYTES,
		.length = pages * ISW_PAGE_BYTES,
		.data = data,
		.done = asked_done,
	};
	sem_init(&a->ended, 0, 0);
	iswi_engine_submit(e, &a->req);
}

/* Its error, or 0. */
static inline int answer(struct asked *a)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += REAL_WAIT_MS / 1000;
	CHECK_EQ(sem_timedwait(&a->ended, &until), 0);
	return a->error;
}

static inline int ask_and_wait(isw_engine *e, enum iswi_req_op op, uint64_t page, uint32_t pages,
			       void *data)
{
	struct asked a;

	ask(e, &a, op, page, pages, data);
	return answer(&a);
}

/* --------------------------------------------------------------- a backup, and a donor */

/* The i-th place where a backup may lie; false: there is no other. */
static inline bool backup_path(uint32_t i, const char *name, char *path, size_t bytes)
{
	const char *tmp = getenv("TMPDIR");
	const char *directories[] = {".", tmp ? tmp : "/tmp", "/var/tmp", "/tmp"};

	if (i == ISWI_ARRAY_LEN(directories))
		return false;
	snprintf(path, bytes, "%s/isw-%s-%d.backup", directories[i], name, (int)getpid());
	return true;
}

/* A path that takes direct I/O. */
static inline void find_backup(const char *name, char *path, size_t bytes)
{
	for (uint32_t i = 0; backup_path(i, name, path, bytes); i++) {
		int fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);

		unlink(path);
		if (fd < 0)
			continue;
		close(fd);
		return;
	}
	SKIP("no directory here takes direct I/O");
}

/* Its backup file has no name, so that a test that is killed leaves none. */
static inline isw_engine *engine_with_backup(const struct isw_engine_config *config,
					     const char *name)
{
	struct isw_error error = {0};
	char path[4096];
	isw_engine *e;

	for (uint32_t i = 0; backup_path(i, name, path, sizeof(path)); i++) {
		int code = isw_engine_create(config, path, &e, &error);

		unlink(path);
		if (!code)
			return e;
		fprintf(stderr, "%s\n", error.text);
	}
	SKIP("no directory here takes direct I/O");
}

/* What a consumer says to connect to it: `bytes` of slots, by so many connections. Until the next.
 */
static inline struct isw_remote_config
donor_config(const char *host, uint16_t port, const char *ticket, uint32_t queues, uint64_t bytes)
{
	static _Thread_local const char *tickets[ISW_RDMA_QUEUES_MAX];

	for (uint32_t i = 0; i < ISW_RDMA_QUEUES_MAX; i++)
		tickets[i] = ticket;
	return (struct isw_remote_config){
		.host = host,
		.port = port,
		.tickets = tickets,
		.queues = queues,
		.connect_ms_max = REAL_WAIT_MS,
		.request_ms_max = REAL_WAIT_MS,
		.export_bytes = bytes,
	};
}

/* A store that listens and has so many slabs, `ready` of them to be mapped at once. */
static inline isw_store *donor_store(const char *host, uint64_t slab_bytes, uint32_t slabs,
				     uint32_t ready, uint16_t *port)
{
	const struct isw_store_config config = {
		.slab_bytes = slab_bytes,
		.slabs_max = slabs,
		.leases_max = 4,
		.connections_max = 16,
		.connections_per_lease_max = 16,
		.handshake_ms_max = REAL_WAIT_MS,
		.send_ms_max = REAL_WAIT_MS,
	};
	isw_store *store;

	CHECK_EQ(isw_store_create(&config, &store, NULL), 0);
	CHECK_EQ(isw_store_listen(store, host, 0, port, NULL), 0);
	for (uint32_t i = 0; i < ready; i++)
		CHECK_EQ(isw_store_preallocate(store, NULL), 0);
	return store;
}

#endif
