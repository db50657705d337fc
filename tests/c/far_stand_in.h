/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device for agents that keeps their blocks in its own memory, and dies, returns, is silent or
 * refuses when a test says so: for tests of the agent's life. One thread does it all.
 */
#ifndef ISW_TEST_FAR_STAND_IN_H
#define ISW_TEST_FAR_STAND_IN_H

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "far/ring.h"

#define STAND_IN_CLIENTS 8u
#define STAND_IN_BLOCKS  512u

struct stand_in_client {
	bool used;
	int sock, uffd, bell[ISWF_KINDS];
	struct iswf_ring *ring;
	char *blocks[STAND_IN_BLOCKS];
};

struct stand_in_counts {
	uint32_t hellos; /* of new clients */
	uint32_t returns, ends, offs[ISWF_OFFS];
	uint64_t out, in, back[ISWF_WHYS], lost; /* as told, of clients that ended */
	uint64_t pages_read;
};

enum stand_in_mood {
	STAND_IN_SERVES,
	STAND_IN_DEAD,   /* has no client, and hears nobody */
	STAND_IN_SILENT, /* hears hellos, and answers none */
	STAND_IN_FULL,   /* refuses everybody */
	STAND_IN_OTHER   /* is of another version, and refuses everybody */
};

struct stand_in {
	int job, job_end; /* ours, the job's */
	int changed;      /* eventfd */
	pthread_t thread;
	pthread_mutex_t lock; /* the rest */
	enum stand_in_mood mood;
	bool stopping, speaks; /* says an empty packet to each client */
	bool is_changed;       /* the thread has not looked at that yet */
	struct stand_in_client clients[STAND_IN_CLIENTS];
	struct stand_in_counts counts;
};

/* ------------------------------------------------------------------- requests */

static inline int32_t stand_in_do(struct stand_in *s, struct stand_in_client *c, uint32_t slot)
{
	const struct iswf_slot *asked = &c->ring->slots[slot];
	char *bytes = iswf_bytes(c->ring, slot), **block;
	size_t at = (size_t)asked->first * ISWF_PAGE_BYTES;
	size_t length = (size_t)asked->pages * ISWF_PAGE_BYTES;

	CHECK(asked->block < STAND_IN_BLOCKS && asked->pages > 0);
	CHECK(asked->first + asked->pages <= ISWF_BLOCK_PAGES);
	block = &c->blocks[asked->block];
	switch ((enum iswf_op)asked->op) {
	case ISWF_WRITE:
		if (*block == NULL)
			*block = calloc(1, ISWF_BLOCK_BYTES);
		CHECK(*block != NULL);
		memcpy(*block + at, bytes, length);
		return 0;
	case ISWF_READ:
		if (*block == NULL)
			return -ENOENT;
		memcpy(bytes, *block + at, length);
		s->counts.pages_read += asked->pages;
		return 0;
	case ISWF_DISCARD:
		if (asked->pages == ISWF_BLOCK_PAGES) {
			free(*block);
			*block = NULL;
		}
		return 0;
	case ISWF_CONFIRM:
		return *block == NULL ? -ENOENT : 0;
	}
	return -EINVAL;
}

static inline void stand_in_look(struct stand_in *s, struct stand_in_client *c)
{
	for (uint32_t i = 0; i < ISWF_SLOTS; i++) {
		struct iswf_slot *slot = &c->ring->slots[i];

		if (atomic_load_explicit(&slot->state, memory_order_acquire) != ISWF_ASKED)
			continue;
		slot->result = stand_in_do(s, c, i);
		atomic_store_explicit(&slot->state, ISWF_ANSWERED, memory_order_release);
		syscall(SYS_futex, &slot->state, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
	}
}

/* ------------------------------------------------------------------- clients */

static inline void stand_in_hang_up(struct stand_in_client *c)
{
	if (c->ring == NULL)
		return;
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		close(c->bell[kind]);
	close(c->sock);
	munmap(c->ring, ISWF_RING_BYTES);
	c->ring = NULL;
}

static inline void stand_in_end(struct stand_in *s, struct stand_in_client *c)
{
	const struct iswf_told *told = c->ring == NULL ? NULL : &c->ring->told;

	s->counts.ends++;
	if (told != NULL) {
		s->counts.out += atomic_load(&told->pages_out);
		s->counts.in += atomic_load(&told->pages_in);
		s->counts.lost += atomic_load(&told->pages_lost);
		for (uint32_t why = 0; why < ISWF_WHYS; why++)
			s->counts.back[why] += atomic_load(&told->pages_back[why]);
	}
	stand_in_hang_up(c);
	for (uint32_t i = 0; i < STAND_IN_BLOCKS; i++)
		free(c->blocks[i]);
	close(c->uffd);
	memset(c, 0, sizeof(*c));
}

static inline void stand_in_answer(int sock, const struct iswf_welcome *welcome, const int *fds)
{
	union {
		char bytes[CMSG_SPACE(3 * sizeof(int))];
		struct cmsghdr align;
	} control = {.bytes = {0}};
	struct iovec data = {(void *)(uintptr_t)welcome, sizeof(*welcome)};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};

	if (fds != NULL) {
		message.msg_control = control.bytes;
		message.msg_controllen = sizeof(control.bytes);
		CMSG_FIRSTHDR(&message)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&message)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&message)->cmsg_len = CMSG_LEN(3 * sizeof(int));
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), fds, 3 * sizeof(int));
	}
	(void)sendmsg(sock, &message, MSG_NOSIGNAL);
}

static inline void stand_in_admit(struct stand_in *s, const struct iswf_hello *hello,
				  const int fds[2])
{
	struct iswf_welcome welcome = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION,
		.blocks_max = STAND_IN_BLOCKS,
	};
	uint32_t i = hello->client != 0 ? hello->client - 1 : 0;
	struct stand_in_client *c;
	int ring;

	while (hello->client == 0 && s->clients[i].used)
		i++;
	CHECK(i < STAND_IN_CLIENTS);
	c = &s->clients[i];
	if (hello->client != 0) {
		CHECK(c->used && c->ring == NULL && hello->token[0] == (uint8_t)(i + 1));
		close(c->uffd);
		s->counts.returns++;
	} else {
		s->counts.hellos++;
	}
	ring = memfd_create("ring", MFD_CLOEXEC);
	CHECK(ring >= 0);
	CHECK_EQ(ftruncate(ring, ISWF_RING_BYTES), 0);
	c->used = true;
	c->sock = fds[0];
	c->uffd = fds[1];
	c->ring = mmap(NULL, ISWF_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, ring, 0);
	CHECK(c->ring != MAP_FAILED);
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		c->bell[kind] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	welcome.client = i + 1;
	welcome.token[0] = (uint8_t)(i + 1);
	stand_in_answer(c->sock, &welcome, (const int[]){ring, c->bell[0], c->bell[1]});
	close(ring);
}

static inline void stand_in_greet(struct stand_in *s)
{
	const bool other = s->mood == STAND_IN_OTHER;
	const struct iswf_welcome refusal = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION + other,
		.refused = other ? -EPROTO : -ENOSPC,
	};
	struct iswf_hello hello;
	union {
		char bytes[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec data = {&hello, sizeof(hello)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	int fds[2];

	if (recvmsg(s->job, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0)
		return;
	CHECK_EQ(hello.magic, ISWF_MAGIC);
	if (hello.off != ISWF_OFF_NONE) {
		CHECK(hello.off < ISWF_OFFS && CMSG_FIRSTHDR(&message) == NULL);
		s->counts.offs[hello.off]++;
		return;
	}
	CHECK(CMSG_FIRSTHDR(&message) != NULL);
	memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fds));
	if (s->mood == STAND_IN_SERVES) {
		stand_in_admit(s, &hello, fds);
		return;
	}
	close(fds[1]);
	if (s->mood != STAND_IN_FULL && !other)
		return; /* who is silent keeps the other one open */
	stand_in_answer(fds[0], &refusal, NULL);
	close(fds[0]);
}

/* ------------------------------------------------------------------- its thread */

static inline void stand_in_change(struct stand_in *s)
{
	uint64_t count;

	(void)!read(s->changed, &count, sizeof(count));
	for (uint32_t i = 0; i < STAND_IN_CLIENTS; i++) {
		struct stand_in_client *c = &s->clients[i];

		if (s->mood == STAND_IN_DEAD)
			stand_in_hang_up(c);
		else if (s->speaks && c->ring != NULL)
			CHECK_EQ(send(c->sock, "", 0, MSG_NOSIGNAL), 0);
	}
	s->speaks = s->is_changed = false;
}

static inline void *stand_in_main(void *arg)
{
	struct stand_in *s = arg;
	struct pollfd fds[2 + 3 * STAND_IN_CLIENTS];

	pthread_mutex_lock(&s->lock);
	while (!s->stopping) {
		nfds_t count = 2;

		fds[0] = (struct pollfd){.fd = s->changed, .events = POLLIN};
		fds[1] = (struct pollfd){
			.fd = s->mood == STAND_IN_DEAD ? -1 : s->job,
			.events = POLLIN,
		};
		for (uint32_t i = 0; i < STAND_IN_CLIENTS; i++) {
			const struct stand_in_client *c = &s->clients[i];
			bool here = c->ring != NULL;

			fds[count++] = (struct pollfd){.fd = here ? c->sock : -1};
			for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
				fds[count++] = (struct pollfd){
					.fd = here ? c->bell[kind] : -1,
					.events = POLLIN,
				};
		}
		pthread_mutex_unlock(&s->lock);
		(void)poll(fds, count, -1);
		pthread_mutex_lock(&s->lock);
		if (fds[0].revents != 0) {
			stand_in_change(s);
			continue; /* who is there may be others */
		}
		for (uint32_t i = 0; i < STAND_IN_CLIENTS; i++) {
			struct stand_in_client *c = &s->clients[i];
			uint64_t rung;

			for (uint32_t kind = 0; c->ring != NULL && kind < ISWF_KINDS; kind++)
				(void)!read(c->bell[kind], &rung, sizeof(rung));
			if (c->ring != NULL)
				stand_in_look(s, c);
			if (c->ring != NULL && fds[2 + 3 * i].revents & POLLHUP)
				stand_in_end(s, c);
		}
		if (fds[1].revents & POLLIN)
			stand_in_greet(s);
	}
	pthread_mutex_unlock(&s->lock);
	return NULL;
}

static inline void stand_in_start(struct stand_in *s)
{
	int pair[2];

	memset(s, 0, sizeof(*s));
	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	s->job = pair[0];
	s->job_end = pair[1];
	s->changed = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	pthread_mutex_init(&s->lock, NULL);
	CHECK_EQ(pthread_create(&s->thread, NULL, stand_in_main, s), 0);
}

static inline void stand_in_wake(struct stand_in *s)
{
	const uint64_t one = 1;

	CHECK_EQ(write(s->changed, &one, sizeof(one)), 8);
}

/* When it returns, it is so. */
static inline void stand_in_apply(struct stand_in *s, enum stand_in_mood mood, bool speaks)
{
	const struct timespec tick = {.tv_nsec = 100000};
	bool done = false;

	pthread_mutex_lock(&s->lock);
	s->mood = mood;
	s->speaks = speaks;
	s->is_changed = true;
	pthread_mutex_unlock(&s->lock);
	stand_in_wake(s);
	while (!done) {
		nanosleep(&tick, NULL);
		pthread_mutex_lock(&s->lock);
		done = !s->is_changed;
		pthread_mutex_unlock(&s->lock);
	}
}

static inline void stand_in_set(struct stand_in *s, enum stand_in_mood mood)
{
	stand_in_apply(s, mood, false);
}

static inline void stand_in_speak(struct stand_in *s)
{
	stand_in_apply(s, STAND_IN_SERVES, true);
}

static inline struct stand_in_counts stand_in_counts(struct stand_in *s)
{
	struct stand_in_counts counts;

	pthread_mutex_lock(&s->lock);
	counts = s->counts;
	pthread_mutex_unlock(&s->lock);
	return counts;
}

/* What was said by now is counted, and every client has ended. */
static inline bool stand_in_has_heard(struct stand_in *s)
{
	struct pollfd job = {.fd = s->job, .events = POLLIN};
	bool heard;

	pthread_mutex_lock(&s->lock);
	heard = poll(&job, 1, 0) == 0 && s->counts.ends == s->counts.hellos;
	pthread_mutex_unlock(&s->lock);
	return heard;
}

/* Every process has ended, and so its clients do: what they told is counted. */
static inline struct stand_in_counts stand_in_stop(struct stand_in *s)
{
	const struct timespec tick = {.tv_nsec = 1000000};

	for (uint32_t i = 0; s->mood == STAND_IN_SERVES && !stand_in_has_heard(s); i++) {
		CHECK(i < 10000);
		nanosleep(&tick, NULL);
	}
	pthread_mutex_lock(&s->lock);
	s->stopping = true;
	pthread_mutex_unlock(&s->lock);
	stand_in_wake(s);
	pthread_join(s->thread, NULL);
	for (uint32_t i = 0; i < STAND_IN_CLIENTS; i++)
		if (s->clients[i].used)
			stand_in_end(s, &s->clients[i]);
	if (s->job >= 0)
		close(s->job);
	close(s->job_end);
	close(s->changed);
	return s->counts;
}

#endif
