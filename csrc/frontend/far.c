/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The front end far: its life and its threads. One hears hellos (far_hello.c), one ends clients,
 * and one for each kind of request takes what is asked in the rings.
 */
#define _GNU_SOURCE 1
#include "frontend/far.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "frontend/far_client.h"

#ifndef SO_PASSPIDFD /* Linux 6.5 */
#define SO_PASSPIDFD 76
#endif
#define EVENTS_MAX  16
#define HELLO_S_MAX 5 /* at the end: it may be closing what will not be closed */
#define TRIM_BYTES  (1ull << 30)

/* -------------------------------------------------------------------- threads */

/* A socket says nothing after its hello: whatever happens there is its end. */
static void end_client(struct far *far, uint64_t data)
{
	struct far_client *client = &far->clients[(uint32_t)data];

	if (client->generation == (data >> 32) % ISWI_FAR_GENERATIONS)
		iswi_far_begin_end(client, data >> 56 == ISWI_FAR_ABOUT_SOCK);
}

static void *control_main(void *arg)
{
	struct far *far = arg;
	struct epoll_event events[EVENTS_MAX];

	while (!atomic_load(&far->stopping)) {
		int wait_ms = -1, count;

		pthread_mutex_lock(&far->lock);
		for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
			int next_ms = iswi_far_step(&far->clients[i]);

			if (next_ms >= 0)
				wait_ms = wait_ms < 0 ? next_ms : ISWI_MIN(wait_ms, next_ms);
		}
		pthread_mutex_unlock(&far->lock);
		count = epoll_wait(far->control_epoll, events, EVENTS_MAX, wait_ms);
		pthread_mutex_lock(&far->lock);
		for (int i = 0; i < count; i++) {
			uint64_t data = events[i].data.u64, about = data >> 56;

			if (about == ISWI_FAR_ABOUT_TOLD)
				iswi_far_hear(far->control_told);
			if (about == ISWI_FAR_ABOUT_SOCK || about == ISWI_FAR_ABOUT_PROCESS)
				end_client(far, data);
		}
		pthread_mutex_unlock(&far->lock);
	}
	return NULL;
}

static void look_main(struct far *far, uint32_t kind)
{
	struct epoll_event events[EVENTS_MAX];

	while (!atomic_load(&far->stopping)) {
		int count = epoll_wait(far->look_epoll[kind], events, EVENTS_MAX, -1);

		for (int i = 0; i < count; i++) {
			uint64_t data = events[i].data.u64, about = data >> 56;

			if (about == ISWI_FAR_ABOUT_BELL)
				iswi_far_look(&far->clients[(uint32_t)data], kind);
			if (about != ISWI_FAR_ABOUT_TOLD)
				continue;
			iswi_far_hear(far->look_told[kind]);
			for (uint32_t c = 0; c < ISWI_FAR_CLIENTS_MAX; c++)
				iswi_far_look(&far->clients[c], kind);
		}
	}
}

static void *look_reads(void *far)
{
	look_main(far, ISWF_KIND_READ);
	return NULL;
}

static void *look_writes(void *far)
{
	look_main(far, ISWF_KIND_WRITE);
	return NULL;
}

/* ----------------------------------------------------------------------- life */

static int make_eventfd(int *fd_out)
{
	*fd_out = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return *fd_out < 0 ? -errno : 0;
}

/* What a thread waits at, and how it is told of something. */
static int make_epoll(struct far *far, int *epoll_out, int *told_out)
{
	int code = make_eventfd(told_out);

	if (code != 0)
		return code;
	*epoll_out = epoll_create1(EPOLL_CLOEXEC);
	if (*epoll_out < 0)
		return -errno;
	code = iswi_far_watch(*epoll_out, EPOLL_CTL_ADD, far->stop, EPOLLIN,
			      (uint64_t)ISWI_FAR_ABOUT_STOP << 56);
	if (code != 0)
		return code;
	return iswi_far_watch(*epoll_out, EPOLL_CTL_ADD, *told_out, EPOLLIN,
			      (uint64_t)ISWI_FAR_ABOUT_TOLD << 56);
}

static int make_descriptors(struct far *far)
{
	int code = make_eventfd(&far->stop);

	if (code == 0)
		code = make_epoll(far, &far->control_epoll, &far->control_told);
	if (code == 0)
		code = make_epoll(far, &far->hello_epoll, &far->hello_told);
	for (uint32_t kind = 0; kind < ISWF_KINDS && code == 0; kind++)
		code = make_epoll(far, &far->look_epoll[kind], &far->look_told[kind]);
	return code;
}

static int make_bounces(struct far *far)
{
	size_t bytes = (size_t)ISWI_FAR_BOUNCES * ISWF_BLOCK_BYTES;
	void *bounces = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (bounces == MAP_FAILED)
		return -errno;
	(void)madvise(bounces, bytes, MADV_DONTDUMP); /* pages in clear */
	(void)madvise(bounces, bytes, MADV_DONTFORK);
	far->bounces = bounces;
	for (uint32_t i = 0; i < ISWI_FAR_BOUNCES; i++)
		far->bounce_free[far->bounces_free++] =
			far->bounces + (uint64_t)i * ISWF_BLOCK_BYTES;
	return 0;
}

/* A descriptor of the process, if it is still the one that is meant. */
static int open_process(const struct iswi_far_kept_client *kept)
{
	int fd = (int)syscall(SYS_pidfd_open, kept->pid, 0);

	if (fd >= 0 && iswi_far_started(kept->pid) != kept->started)
		iswi_far_close(&fd);
	return fd;
}

/* The clients of a predecessor that are still there come back; the blocks of the others go. */
static int await_clients(struct far *far)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		struct far_client *client = &far->clients[i];
		int code;

		if (atomic_load(&far->table.kept->clients[i].used) == 0)
			continue;
		client->phase = ISWI_FAR_AWAITED;
		client->pidfd = open_process(&far->table.kept->clients[i]);
		if (client->pidfd < 0) {
			iswi_far_begin_end(client, false);
			continue;
		}
		code = iswi_far_watch(far->control_epoll, EPOLL_CTL_ADD, client->pidfd,
				      EPOLLIN | EPOLLONESHOT,
				      iswi_far_about(ISWI_FAR_ABOUT_PROCESS, client));
		if (code != 0)
			return code;
	}
	return 0;
}

static void trimmed(struct iswi_req *req, int error)
{
	(void)req;
	(void)error; /* none: these requests are right, and discards do not fail */
}

/*
 * Nothing is in the far range that a table does not speak of: an engine that goes on with a new
 * table, or one that keeps its contents, has pages of clients that nobody knows.
 */
static void begin_table(struct far *far)
{
	uint64_t bytes = (uint64_t)far->table.layout.blocks * ISWF_BLOCK_BYTES;

	for (uint64_t at = 0; at < bytes; at += TRIM_BYTES) {
		struct iswi_req req = {
			.op = ISWI_TRIM,
			.flags = ISWI_REQ_FAR,
			.offset = far->offset + at,
			.length = ISWI_MIN(TRIM_BYTES, bytes - at),
			.done = trimmed,
		};

		iswi_engine_submit(far->engine, &req); /* it ends in there */
	}
	iswi_far_table_begin(&far->table);
}

/* hello_main is the first one: see stop_threads. */
static int start_threads(struct far *far)
{
	static void *(*const mains[])(void *) = {iswi_far_hello_main, control_main, look_reads,
						 look_writes};
	static const char *const names[] = {"isw-far-hello", "isw-far", "isw-far-reads",
					    "isw-far-writes"};

	for (; far->threads_count < ISWI_ARRAY_LEN(mains); far->threads_count++) {
		int code = iswi_thread_start(&far->threads[far->threads_count],
					     names[far->threads_count], mains[far->threads_count],
					     far);

		if (code != 0)
			return code;
	}
	return 0;
}

static void init_client(struct far *far, uint32_t index)
{
	struct far_client *client = &far->clients[index];

	client->far = far;
	client->index = index;
	pthread_mutex_init(&client->leave_lock, NULL);
	client->sock = client->pidfd = client->uffd = -1;
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++) {
		client->bell[kind] = -1;
		pthread_mutex_init(&client->look_lock[kind], NULL);
	}
	for (uint32_t slot = 0; slot < ISWF_SLOTS; slot++) {
		client->requests[slot].client = client;
		client->requests[slot].slot = slot;
	}
}

static void init(struct far *far, isw_engine *engine)
{
	far->frontend.ops = &iswi_far_ops;
	far->engine = engine;
	far->offset = iswi_engine_far_offset(engine);
	far->stop = far->control_epoll = far->hello_epoll = -1;
	far->control_told = far->hello_told = -1;
	pthread_mutex_init(&far->lock, NULL);
	pthread_mutex_init(&far->bounce_lock, NULL);
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		far->look_epoll[kind] = far->look_told[kind] = -1;
	for (uint32_t i = 0; i < ISWI_FAR_JOBS_MAX; i++)
		far->jobs[i].fd = -1;
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		init_client(far, i);
}

/* False: the thread that closes what clients gave waits there, for ever as far as we know. */
static bool stop_threads(struct far *far)
{
	struct timespec until;

	atomic_store(&far->stopping, true);
	if (far->stop >= 0)
		iswi_far_tell(far->stop);
	while (far->threads_count > 1)
		pthread_join(far->threads[--far->threads_count], NULL);
	if (far->threads_count == 0)
		return true;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += HELLO_S_MAX;
	return pthread_timedjoin_np(far->threads[0], NULL, &until) == 0;
}

/* Nothing is taken from now on; what is under way ends. */
static void end_requests(struct far *far)
{
	const struct timespec tick = {.tv_nsec = 1000000};

	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		iswi_far_set_live(&far->clients[i], false);
		while (!iswi_far_is_idle(&far->clients[i]))
			nanosleep(&tick, NULL);
	}
}

static void free_far(struct far *far)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		iswi_far_drop_ring(&far->clients[i]);
		iswi_far_close(&far->clients[i].sock);
		iswi_far_close(&far->clients[i].pidfd);
		iswi_far_close(&far->clients[i].uffd);
	}
	for (uint32_t i = 0; i < ISWI_FAR_JOBS_MAX; i++)
		iswi_far_close(&far->jobs[i].fd);
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++) {
		iswi_far_close(&far->look_epoll[kind]);
		iswi_far_close(&far->look_told[kind]);
	}
	iswi_far_close(&far->control_epoll);
	iswi_far_close(&far->control_told);
	iswi_far_close(&far->hello_epoll);
	iswi_far_close(&far->hello_told);
	iswi_far_close(&far->stop);
	if (far->bounces != NULL)
		munmap(far->bounces, (size_t)ISWI_FAR_BOUNCES * ISWF_BLOCK_BYTES);
	if (far->table.kept != NULL)
		iswi_far_table_close(&far->table);
	free(far);
}

/* Who waits in a client's file still has it all, then: it goes with the process. */
static void far_destroy(isw_frontend *frontend)
{
	struct far *far = ISWI_CONTAINER(frontend, struct far, frontend);
	bool stopped = stop_threads(far);

	end_requests(far);
	if (stopped)
		free_far(far);
}

static bool is_mapped(const void *engine, uint32_t slab)
{
	return iswi_engine_is_mapped(engine, slab);
}

static uint32_t numbers_for(uint64_t blocks)
{
	uint64_t numbers = ISWI_MAX(blocks * ISWI_FAR_NUMBERS_TIMES, ISWI_FAR_NUMBERS_MIN);

	return (uint32_t)ISWI_MAX(blocks, ISWI_MIN(numbers, ISWI_FAR_NUMBERS_MAX));
}

static int far_start(isw_engine *engine, const struct isw_frontend_config *config,
		     isw_frontend **frontend_out, struct isw_error *error)
{
	uint64_t blocks = iswi_engine_far_bytes(engine) / ISWF_BLOCK_BYTES;
	struct iswi_far_layout layout = {
		.blocks = (uint32_t)blocks,
		.numbers = numbers_for(blocks),
		.offset = iswi_engine_far_offset(engine),
		.slab_bytes = iswi_engine_slab_bytes(engine),
		.is_mapped = is_mapped,
		.ctx = engine,
	};
	struct far *far;
	bool is_new;
	int code;

	if (blocks == 0 || blocks > UINT32_MAX / 2)
		return iswi_error(error, -EINVAL, "this device has no range for far memory");
	far = calloc(1, sizeof(*far));
	if (far == NULL)
		return iswi_error(error, -ENOMEM, "no memory for far memory's front end");
	init(far, engine);
	code = iswi_far_table_open(&far->table, config->table_fd, &layout, &is_new, error);
	if (code != 0)
		goto err_far;
	if (is_new)
		begin_table(far);
	code = make_descriptors(far);
	if (code == 0)
		code = make_bounces(far);
	if (code == 0)
		code = await_clients(far);
	if (code == 0)
		code = start_threads(far);
	if (code != 0) {
		iswi_error(error, code, "far memory's front end could not be set up: %s",
			   strerror(-code));
		goto err_far;
	}
	*frontend_out = &far->frontend;
	return 0;

err_far:
	far_destroy(&far->frontend);
	return code;
}

/* With each hello the kernel says who sent it. What was sent before this says nothing of that. */
static int hear_senders(int fd)
{
	const int on = 1;

	if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0 ||
	    setsockopt(fd, SOL_SOCKET, SO_PASSPIDFD, &on, sizeof(on)) != 0)
		return -errno;
	return 0;
}

/* Under the lock: enters a job's socket, which is then watched. */
static int add_job(struct far *far, int fd)
{
	struct stat attr;
	uint32_t i = 0;
	int code;

	if (fstat(fd, &attr) != 0)
		return -errno;
	while (i < ISWI_FAR_JOBS_MAX && far->jobs[i].fd >= 0)
		i++;
	if (i == ISWI_FAR_JOBS_MAX)
		return -ENOSPC;
	far->jobs[i] = (struct far_job){.fd = fd, .id = attr.st_ino};
	code = iswi_far_watch(far->hello_epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLRDHUP,
			      (uint64_t)ISWI_FAR_ABOUT_JOB << 56 | i);
	if (code != 0)
		far->jobs[i].fd = -1;
	return code;
}

/* One more job: its socket, on which processes say hello. */
static int far_serve(isw_frontend *frontend, int32_t fd, struct isw_error *error)
{
	struct far *far = ISWI_CONTAINER(frontend, struct far, frontend);
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 0), code = own < 0 ? -errno : 0;

	if (code == 0)
		code = hear_senders(own);
	if (code == 0) {
		pthread_mutex_lock(&far->lock);
		code = add_job(far, own);
		pthread_mutex_unlock(&far->lock);
	}
	if (code == 0)
		return 0;
	iswi_far_close(&own);
	if (code == -ENOSPC)
		return iswi_error(error, code,
				  "the device serves the far memory of %u jobs already",
				  ISWI_FAR_JOBS_MAX);
	return iswi_error(error, code, "the job's socket cannot be served: %s", strerror(-code));
}

static void far_info(const isw_frontend *frontend, struct isw_frontend_info *info_out)
{
	struct far *far = ISWI_CONTAINER((isw_frontend *)(uintptr_t)frontend, struct far, frontend);

	info_out->size_bytes = (uint64_t)far->table.layout.blocks * ISWF_BLOCK_BYTES;
	info_out->requests_max = ISWI_FAR_REQUESTS_MAX;
	info_out->used_bytes = (uint64_t)iswi_far_places_used(&far->table) * ISWF_BLOCK_BYTES;
	pthread_mutex_lock(&far->lock);
	info_out->far = far->table.kept->told;
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		struct far_client *client = &far->clients[i];

		info_out->connections += client->phase >= ISWI_FAR_AWAITED &&
					 client->phase <= ISWI_FAR_LEAVING &&
					 (client->phase != ISWI_FAR_ENDING || client->returns);
		iswi_far_add_told(client, &info_out->far);
		info_out->away_bytes += iswi_far_pages_away(client) * ISWF_PAGE_BYTES;
	}
	iswi_far_tell_others(far); /* who shows it asks once a second: `run`, for one */
	pthread_mutex_unlock(&far->lock);
	info_out->away_bytes = ISWI_MIN(info_out->away_bytes, info_out->used_bytes);
}

const struct iswi_frontend_ops iswi_far_ops = {
	.name = "far",
	.start = far_start,
	.destroy = far_destroy,
	.info = far_info,
	.serve = far_serve,
};
