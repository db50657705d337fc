/* SPDX-License-Identifier: Apache-2.0 */
/* A client's ring, and its end: its requests, its blocks, what it gave, one after the other. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "frontend/far_client.h"

#define RETRY_MS     100
#define ROUND_BLOCKS 64u /* discarded before the control thread looks at others */
#define STAT_BYTES   1024u
#define STAT_FIELDS  20u   /* from the state on, the start time is the 20th */
#define MUCH_PAGES   4096u /* beside a process with so many away others do not pause */

/* The words of both structures are the same ones, in the same order. */
#define TOLD_WORDS (sizeof(struct iswf_told) / sizeof(uint64_t))
_Static_assert(offsetof(struct isw_far_told, back_fork) == offsetof(struct iswf_told, pages_back),
	       "counts are added up by position");
_Static_assert(offsetof(struct isw_far_told, off_kernel) == sizeof(struct iswf_told),
	       "each reason of enum iswf_why has a count");
_Static_assert(sizeof(struct isw_far_told) ==
		       sizeof(struct iswf_told) + (ISWF_OFFS - 1) * sizeof(uint64_t),
	       "each reason of enum iswf_off has a count");

/* ------------------------------------------------------------------ descriptors */

int iswi_far_watch(int epoll, int op, int fd, uint32_t events, uint64_t about)
{
	struct epoll_event event = {.events = events, .data.u64 = about};

	return epoll_ctl(epoll, op, fd, &event) == 0 ? 0 : -errno;
}

uint64_t iswi_far_about(enum iswi_far_about about, const struct far_client *client)
{
	return (uint64_t)about << 56 | (uint64_t)client->generation << 32 | client->index;
}

void iswi_far_close(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

uint64_t iswi_far_started(pid_t pid)
{
	char path[32], stat[STAT_BYTES], *at;
	ssize_t got;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	got = read(fd, stat, sizeof(stat) - 1);
	close(fd);
	if (got <= 0)
		return 0;
	stat[got] = '\0';
	at = strrchr(stat, ')'); /* a name may have any character */
	for (uint32_t i = 0; at != NULL && i < STAT_FIELDS; i++)
		at = strchr(at + 1, ' ');
	return at == NULL ? 0 : strtoull(at, NULL, 10);
}

/* ------------------------------------------------------------------------ ring */

static int make_ring(struct iswf_ring **ring_out)
{
	int fd = memfd_create("infiniswap-far", MFD_CLOEXEC | MFD_ALLOW_SEALING), err;
	void *ring;

	if (fd < 0)
		return -errno;
	if (ftruncate(fd, ISWF_RING_BYTES) != 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
		goto err_fd;
	ring = mmap(NULL, ISWF_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
		    0);
	if (ring == MAP_FAILED)
		goto err_fd;
	/* As all of this process is locked where that is allowed, so is this. */
	(void)madvise(ring, ISWF_RING_BYTES, MADV_DONTDUMP);
	(void)madvise(ring, ISWF_RING_BYTES, MADV_DONTFORK);
	*ring_out = ring;
	return fd;

err_fd:
	err = -errno;
	close(fd);
	return err;
}

int iswi_far_make_link(struct far_client *client)
{
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++) {
		int bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), code;

		client->bell[kind] = bell;
		if (bell < 0)
			return -errno;
		code = iswi_far_watch(client->far->look_epoll[kind], EPOLL_CTL_ADD, bell,
				      EPOLLIN | EPOLLET,
				      iswi_far_about(ISWI_FAR_ABOUT_BELL, client));
		if (code != 0)
			return code;
	}
	for (uint32_t i = 0; i < ISWF_SLOTS; i++)
		atomic_store(&client->requests[i].taken, false);
	pthread_mutex_lock(&client->leave_lock);
	client->ending = false;
	pthread_mutex_unlock(&client->leave_lock);
	return make_ring(&client->ring);
}

/* ----------------------------------------------------------------------- counts */

/* A new ring's counts are 0 until its agent has stored the totals, so the larger ones count. */
static void see_told(struct far_client *client)
{
	const _Atomic uint64_t *from = (const _Atomic uint64_t *)&client->ring->told;
	_Atomic uint64_t *to = (_Atomic uint64_t *)&client->told;

	for (size_t i = 0; i < TOLD_WORDS; i++) {
		uint64_t now = atomic_load_explicit(&from[i], memory_order_relaxed);
		uint64_t before = atomic_load_explicit(&to[i], memory_order_relaxed);

		atomic_store_explicit(&to[i], ISWI_MAX(now, before), memory_order_relaxed);
	}
}

void iswi_far_add_told(struct far_client *client, struct isw_far_told *told)
{
	const _Atomic uint64_t *from = (const _Atomic uint64_t *)&client->told;
	uint64_t *to = (uint64_t *)told;

	if (client->phase == ISWI_FAR_LIVE)
		see_told(client);
	for (size_t i = 0; i < TOLD_WORDS; i++)
		to[i] += atomic_load_explicit(&from[i], memory_order_relaxed);
}

uint64_t iswi_far_pages_away(const struct far_client *client)
{
	uint64_t pages;

	if (client->phase != ISWI_FAR_LIVE)
		return 0;
	pages = atomic_load_explicit(&client->ring->pages_away, memory_order_relaxed);
	return ISWI_MIN(pages, (uint64_t)client->far->table.layout.blocks * ISWF_BLOCK_PAGES);
}

static uint32_t others_of(const struct far *far, const struct far_client *client)
{
	const struct iswi_far_kept_client *kept = far->table.kept->clients;
	uint32_t count = 0;

	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		count += i != client->index && /* live, then: what is kept of it is there */
			 iswi_far_pages_away(&far->clients[i]) >= MUCH_PAGES &&
			 kept[i].job == kept[client->index].job;
	return count;
}

void iswi_far_tell_others(struct far *far)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		if (far->clients[i].phase == ISWI_FAR_LIVE)
			atomic_store_explicit(&far->clients[i].ring->others,
					      others_of(far, &far->clients[i]),
					      memory_order_relaxed);
}

void iswi_far_count_off(struct far *far, uint32_t off)
{
	uint64_t *words = (uint64_t *)&far->table.kept->told;

	if (off != ISWF_OFF_NONE && off < ISWF_OFFS)
		words[TOLD_WORDS + off - 1]++;
}

/* -------------------------------------------------------------------------- end */

void iswi_far_set_live(struct far_client *client, bool live)
{
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		pthread_mutex_lock(&client->look_lock[kind]);
	client->live = live;
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		pthread_mutex_unlock(&client->look_lock[kind]);
}

/* The client may keep copies of its bells: what is closed here only would still be watched. */
static void unwatch_bells(struct far_client *client)
{
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		if (client->bell[kind] >= 0)
			(void)epoll_ctl(client->far->look_epoll[kind], EPOLL_CTL_DEL,
					client->bell[kind], NULL);
}

/* Its mapping of the ring, too: so the memory is given back first, which locked memory cannot be.
 */
void iswi_far_drop_ring(struct far_client *client)
{
	unwatch_bells(client);
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		iswi_far_close(&client->bell[kind]);
	if (client->ring == NULL)
		return;
	(void)munlock(client->ring, ISWF_RING_BYTES);
	(void)madvise(client->ring, ISWF_RING_BYTES, MADV_REMOVE);
	munmap(client->ring, ISWF_RING_BYTES);
	client->ring = NULL;
}

bool iswi_far_is_idle(struct far_client *client)
{
	bool idle;

	pthread_mutex_lock(&client->leave_lock);
	idle = client->in_flight == 0;
	pthread_mutex_unlock(&client->leave_lock);
	return idle;
}

void iswi_far_begin_discard(struct far_client *client)
{
	client->phase = ISWI_FAR_DISCARDING;
	client->discard_from = 0;
	atomic_store(&client->discarded, 0);
	iswi_far_tell(client->far->control_told);
}

void iswi_far_begin_end(struct far_client *client, bool returns)
{
	struct far *far = client->far;

	if (client->phase == ISWI_FAR_ENDING)
		client->returns &= returns;
	if (client->phase == ISWI_FAR_LEFT && !returns)
		iswi_far_begin_discard(client);
	if (client->phase != ISWI_FAR_LIVE && client->phase != ISWI_FAR_AWAITED)
		return;
	iswi_far_set_live(client, false);
	if (client->phase == ISWI_FAR_LIVE)
		see_told(client);
	client->phase = ISWI_FAR_ENDING;
	client->returns = returns;
	unwatch_bells(client);
	if (client->sock >= 0)
		(void)epoll_ctl(far->control_epoll, EPOLL_CTL_DEL, client->sock, NULL);
	pthread_mutex_lock(&client->leave_lock);
	client->ending = true;
	pthread_mutex_unlock(&client->leave_lock);
	iswi_far_tell(far->control_told);
}

/* No block is left to it. */
static void forget(struct far_client *client)
{
	struct iswi_far_kept *kept = client->far->table.kept;

	iswi_far_add_told(client, &kept->told);
	memset(&client->told, 0, sizeof(client->told));
	atomic_store(&kept->clients[client->index].used, 0);
	client->phase = ISWI_FAR_CLOSING;
	iswi_far_tell(client->far->hello_told);
}

/* So many blocks, then others have their turn. */
static int discard_round(struct far_client *client)
{
	for (uint32_t i = 0; i < ROUND_BLOCKS; i++) {
		int outcome = atomic_load_explicit(&client->discarded, memory_order_acquire);

		if (outcome == 1)
			return -1; /* who ends it tells */
		if (!iswi_far_discard_next(client)) {
			forget(client);
			return -1;
		}
		if (atomic_load_explicit(&client->discarded, memory_order_acquire) < 0)
			return RETRY_MS;
	}
	return 0;
}

int iswi_far_step(struct far_client *client)
{
	if (client->phase == ISWI_FAR_ENDING && iswi_far_is_idle(client)) {
		if (client->returns) {
			client->phase = ISWI_FAR_LEFT;
			iswi_far_tell(client->far->hello_told);
		} else {
			iswi_far_begin_discard(client);
		}
	}
	return client->phase == ISWI_FAR_DISCARDING ? discard_round(client) : -1;
}
