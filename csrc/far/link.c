/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent's end of the ring: requests, one a slot, each waited for by the thread that asks. When
 * the device's process dies its socket ends; the link then says hello to the successor, on the
 * job's socket, and threads that wait ask again in the new ring.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define ANSWER_S_MAX 1 /* then the waiting thread looks whether the link is another one */

/* Under `lock`, which is a leaf. */
static struct {
	pthread_mutex_t lock;
	pthread_cond_t slot_free; /* or the link is another one, or gone */
	struct iswf_ring *ring;   /* NULL: there is none now */
	int bell[ISWF_KINDS];
	uint32_t epoch;
	bool used[ISWF_SLOTS];
	bool gone; /* for good */
	uint32_t client, blocks;
	uint8_t token[ISWF_TOKEN_BYTES];
	int job, sock, uffd;
	uint32_t users; /* threads that look at the ring */
} link_ = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.slot_free = PTHREAD_COND_INITIALIZER,
	.bell = {-1, -1},
	.job = -1,
	.sock = -1,
	.uffd = -1,
};

#define L (&link_)

/* ------------------------------------------------------------------- connecting */

static int send_hello(int their_end)
{
	struct iswf_hello hello = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION,
		.client = L->client,
	};
	int fds[] = {their_end, L->uffd};
	union {
		char bytes[CMSG_SPACE(sizeof(fds))];
		struct cmsghdr align;
	} control = {.bytes = {0}};
	struct iovec data = {&hello, sizeof(hello)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct cmsghdr *part = CMSG_FIRSTHDR(&message);

	memcpy(hello.token, L->token, sizeof(hello.token));
	part->cmsg_level = SOL_SOCKET;
	part->cmsg_type = SCM_RIGHTS;
	part->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(part), fds, sizeof(fds));
	while (sendmsg(L->job, &message, MSG_NOSIGNAL) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

/* The answer, with its descriptors. */
static int hear_welcome(struct iswf_welcome *welcome, int fds[3])
{
	union {
		char bytes[CMSG_SPACE(3 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec data = {welcome, sizeof(*welcome)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct cmsghdr *part;
	ssize_t got;

	do
		got = recvmsg(L->sock, &message, MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got != (ssize_t)sizeof(*welcome))
		return got < 0 ? -errno : -EPIPE;
	if (welcome->magic != ISWF_MAGIC || welcome->version != ISWF_VERSION)
		return -EPROTO;
	if (welcome->refused != 0)
		return welcome->refused;
	part = CMSG_FIRSTHDR(&message);
	if (part == NULL || part->cmsg_type != SCM_RIGHTS ||
	    part->cmsg_len != CMSG_LEN(3 * sizeof(int)))
		return -EPROTO;
	memcpy(fds, CMSG_DATA(part), 3 * sizeof(int));
	return 0;
}

/* Lock held. */
static void tell(void)
{
	struct iswf_told *told = &L->ring->told;
	const struct iswf_counts *count = &iswf_agent.count;

	atomic_store_explicit(&told->pages_out, count->pages_out, memory_order_relaxed);
	atomic_store_explicit(&told->pages_in, count->pages_in, memory_order_relaxed);
	atomic_store_explicit(&told->small_fetches, count->small_fetches, memory_order_relaxed);
	atomic_store_explicit(&told->fetches, count->fetches, memory_order_relaxed);
	atomic_store_explicit(&told->fetch_wait_ns, count->fetch_wait_ns, memory_order_relaxed);
	atomic_store_explicit(&told->room_waits, count->room_waits, memory_order_relaxed);
	atomic_store_explicit(&told->room_wait_ns, count->room_wait_ns, memory_order_relaxed);
	atomic_store_explicit(&told->pages_lost, count->pages_lost, memory_order_relaxed);
	for (uint32_t why = 0; why < ISWF_WHYS; why++)
		atomic_store_explicit(&told->pages_back[why], count->handed_back[why],
				      memory_order_relaxed);
}

void iswf_link_tell(void)
{
	pthread_mutex_lock(&L->lock);
	if (L->ring != NULL)
		tell();
	pthread_mutex_unlock(&L->lock);
}

/* Puts the new ring in the old one's place. */
static int use_ring(const struct iswf_welcome *welcome, const int fds[3])
{
	void *ring = iswf_real()->mmap(NULL, ISWF_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
				       fds[0], 0);

	iswf_real()->close(fds[0]);
	if (ring == MAP_FAILED)
		return -ENOMEM;
	(void)iswf_real()->madvise(ring, ISWF_RING_BYTES, MADV_DONTFORK);
	pthread_mutex_lock(&L->lock);
	L->bell[ISWF_KIND_READ] = iswf_own_fd(fds[1]);
	L->bell[ISWF_KIND_WRITE] = iswf_own_fd(fds[2]);
	L->ring = ring;
	tell();
	L->client = welcome->client;
	L->blocks = welcome->blocks_max;
	memcpy(L->token, welcome->token, sizeof(L->token));
	L->epoch++;
	memset(L->used, 0, sizeof(L->used));
	pthread_cond_broadcast(&L->slot_free);
	pthread_mutex_unlock(&L->lock);
	return 0;
}

static int connect_once(void)
{
	struct iswf_welcome welcome;
	int pair[2], fds[3], code;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
		return -errno;
	L->sock = iswf_own_fd(pair[0]);
	code = send_hello(pair[1]);
	iswf_real()->close(pair[1]);
	if (code == 0)
		code = hear_welcome(&welcome, fds);
	if (code == 0)
		code = use_ring(&welcome, fds);
	if (code != 0) {
		iswf_close_own(L->sock);
		L->sock = -1;
	}
	return code;
}

int iswf_link_open(int job_fd, int uffd, uint32_t *blocks_out)
{
	int code;

	L->job = job_fd;
	L->uffd = uffd;
	code = connect_once();
	*blocks_out = L->blocks;
	return code;
}

/* Nobody asks in the old ring any more; who waits there looks up within a second. */
static void lose_ring(void)
{
	struct iswf_ring *ring;

	pthread_mutex_lock(&L->lock);
	ring = L->ring;
	L->ring = NULL;
	L->epoch++;
	for (uint32_t i = 0; i < ISWF_SLOTS; i++)
		(void)iswf_real()->syscall(SYS_futex, &ring->slots[i].state, FUTEX_WAKE, 1 << 30,
					   NULL, NULL, 0);
	while (L->users > 0)
		pthread_cond_wait(&L->slot_free, &L->lock);
	pthread_mutex_unlock(&L->lock);
	iswf_real()->munmap(ring, ISWF_RING_BYTES);
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		iswf_close_own(L->bell[kind]);
}

static void wait_for_end(void)
{
	char byte;
	ssize_t got;

	do
		got = recv(L->sock, &byte, 1, 0);
	while (got > 0 || (got < 0 && errno == EINTR));
	iswf_close_own(L->sock);
	L->sock = -1;
}

void *iswf_link_main(void *arg)
{
	const struct timespec tick = {.tv_nsec = 50000000};
	int code = 0;

	(void)arg;
	while (code == 0) {
		wait_for_end();
		lose_ring();
		/* A pair that ended without a word: another process dies there; EPIPE: none will
		 * come. */
		while ((code = connect_once()) == -EPIPE || code == -ECONNRESET)
			if (code == -EPIPE && send(L->job, "", 0, MSG_NOSIGNAL) < 0)
				break;
			else
				nanosleep(&tick, NULL);
	}
	pthread_mutex_lock(&L->lock);
	L->gone = true;
	pthread_cond_broadcast(&L->slot_free);
	pthread_mutex_unlock(&L->lock);
	return NULL;
}

/* ------------------------------------------------------------------- requests */

/* A slot of that kind, with the ring it is in: its number, or ISWF_NONE at the link's end. */
static uint32_t take_slot(uint32_t kind, uint32_t *epoch_out)
{
	uint32_t from = iswf_first_slot(kind), end = from + iswf_slots(kind);

	for (;;) {
		if (L->gone)
			return ISWF_NONE;
		for (uint32_t i = from; L->ring != NULL && i < end; i++) {
			if (L->used[i])
				continue;
			L->used[i] = true;
			L->users++;
			*epoch_out = L->epoch;
			return i;
		}
		pthread_cond_wait(&L->slot_free, &L->lock);
	}
}

static void give_slot(uint32_t slot, uint32_t epoch)
{
	if (L->epoch == epoch)
		L->used[slot] = false;
	L->users--;
	pthread_cond_broadcast(&L->slot_free);
}

static void ring_bell(int bell)
{
	const uint64_t one = 1;

	(void)!write(bell, &one, sizeof(one));
}

static bool is_of_now(uint32_t epoch)
{
	bool now;

	pthread_mutex_lock(&L->lock);
	now = L->epoch == epoch;
	pthread_mutex_unlock(&L->lock);
	return now;
}

/* True: answered. False: the device's process died. */
static bool wait_for_answer(struct iswf_slot *slot, uint32_t epoch)
{
	const struct timespec most = {.tv_sec = ANSWER_S_MAX};

	while (atomic_load_explicit(&slot->state, memory_order_acquire) != ISWF_ANSWERED) {
		if (!is_of_now(epoch))
			return false;
		(void)iswf_real()->syscall(SYS_futex, &slot->state, FUTEX_WAIT, ISWF_ASKED, &most,
					   NULL, 0);
	}
	return true;
}

int iswf_link_ask(enum iswf_op op, uint32_t block, uint32_t first, uint32_t pages, char *bytes,
		  int (*take)(void *ctx, const char *from), void *ctx)
{
	uint32_t kind = op == ISWF_WRITE ? ISWF_KIND_WRITE : ISWF_KIND_READ;
	bool answered = false;
	int code = -EPIPE;

	pthread_mutex_lock(&L->lock);
	while (!answered) {
		uint32_t epoch, number = take_slot(kind, &epoch);
		struct iswf_slot *slot;
		char *data;
		int bell;

		if (number == ISWF_NONE)
			break;
		slot = &L->ring->slots[number];
		data = iswf_bytes(L->ring, number);
		bell = L->bell[kind];
		pthread_mutex_unlock(&L->lock);

		slot->op = op;
		slot->block = block;
		slot->first = first;
		slot->pages = pages;
		if (op == ISWF_WRITE)
			memcpy(data, bytes, (size_t)pages * ISWF_PAGE_BYTES);
		atomic_store_explicit(&slot->state, ISWF_ASKED, memory_order_release);
		ring_bell(bell);
		answered = wait_for_answer(slot, epoch);
		if (answered) {
			code = slot->result;
			if (code == 0 && take != NULL)
				code = take(ctx, data);
			atomic_store_explicit(&slot->state, ISWF_FREE, memory_order_release);
		}
		pthread_mutex_lock(&L->lock);
		give_slot(number, epoch);
	}
	pthread_mutex_unlock(&L->lock);
	return code;
}
