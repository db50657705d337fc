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
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "far/agent.h"
#include "far/real.h"

#define ANSWER_S_MAX 1    /* then the waiting thread looks whether the link is another one */
#define HELLO_MS_MAX 5000 /* a process that has nothing far yet waits no longer for an answer */
#define TICK_NS      50000000
#define WAKE_NS      1000000

/* Under `lock`, which is a leaf. */
static struct {
	pthread_mutex_t lock;
	pthread_cond_t slot_free; /* or the link is another one, or gone */
	struct iswf_ring *ring;   /* NULL: there is none now */
	void *memory;             /* where the last ring was, or is */
	int bell[ISWF_KINDS];
	uint32_t epoch;
	bool used[ISWF_SLOTS];
	bool gone;    /* for good */
	bool refused; /* by the device, which so knows of it */
	uint32_t client, blocks;
	uint8_t token[ISWF_TOKEN_BYTES];
	int job, sock, uffd;
	int ring_fd;    /* kept: the number is needed when the device's process is another one */
	uint32_t users; /* threads that look at the ring */
} link_ = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.slot_free = PTHREAD_COND_INITIALIZER,
	.bell = {-1, -1},
	.job = -1,
	.sock = -1,
	.uffd = -1,
	.ring_fd = -1,
};

#define L (&link_)

/* ------------------------------------------------------------------- connecting */

static void pause_ns(long ns)
{
	const struct timespec time = {.tv_nsec = ns};

	nanosleep(&time, NULL);
}

/* Every end of the device's is closed: nobody will answer there. */
static bool is_deserted(int sock)
{
	struct pollfd ended = {.fd = sock};

	return poll(&ended, 1, 0) == 1 && (ended.revents & POLLHUP) != 0;
}

/* fds_count: 2, or 0. until_ns: 0: as long as it takes. */
static int send_hello(int job, enum iswf_off off, const int *fds, uint32_t fds_count,
		      uint64_t until_ns)
{
	struct iswf_hello hello = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION,
		.client = off == ISWF_OFF_NONE ? L->client : 0,
		.off = off,
	};
	union {
		char bytes[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr align;
	} control = {.bytes = {0}};
	struct iovec data = {&hello, sizeof(hello)};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
	struct cmsghdr *part;

	memcpy(hello.token, L->token, sizeof(hello.token));
	if (fds_count > 0) {
		message.msg_control = control.bytes;
		message.msg_controllen = sizeof(control.bytes);
		part = CMSG_FIRSTHDR(&message);
		part->cmsg_level = SOL_SOCKET;
		part->cmsg_type = SCM_RIGHTS;
		part->cmsg_len = CMSG_LEN(fds_count * sizeof(int));
		memcpy(CMSG_DATA(part), fds, fds_count * sizeof(int));
	}
	while (sendmsg(job, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
		if (errno != EINTR && errno != EAGAIN)
			return -errno;
		if (errno == EAGAIN && until_ns != 0 && iswf_now_ns() >= until_ns)
			return -ETIMEDOUT;
		if (errno == EAGAIN)
			pause_ns(WAKE_NS);
	}
	return 0;
}

void iswf_link_refuse(int job_fd, enum iswf_off off)
{
	if (!L->refused)
		(void)send_hello(job_fd, off, NULL, 0, 1);
}

static int wait_for_welcome(uint64_t until_ns)
{
	struct pollfd ready = {.fd = L->sock, .events = POLLIN};
	int got;

	do {
		uint64_t now = iswf_now_ns();
		int wait_ms = until_ns == 0     ? -1
			      : until_ns <= now ? 0
						: (int)((until_ns - now) / 1000000) + 1;

		got = poll(&ready, 1, wait_ms);
	} while (got < 0 && errno == EINTR);
	return got == 0 ? -ETIMEDOUT : 0;
}

/*
 * The answer, with its descriptors. -EMFILE: there are no numbers for them. Then it is still there:
 * whoever closes a pair with an answer in it has its blocks taken away.
 */
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
	size_t count = 0;
	ssize_t got;

	do
		got = recvmsg(L->sock, &message, MSG_PEEK | MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got != (ssize_t)sizeof(*welcome))
		return got < 0 ? -errno : got == 0 ? -EPIPE : -EPROTO;
	part = CMSG_FIRSTHDR(&message);
	if (part != NULL && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
		count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		memcpy(fds, CMSG_DATA(part), count * sizeof(int));
	}
	if (welcome->magic == ISWF_MAGIC && welcome->version == ISWF_VERSION &&
	    welcome->refused == 0 && count == 3) {
		(void)recv(L->sock, welcome, sizeof(*welcome), 0);
		return 0;
	}
	while (count > 0)
		iswf_real()->close(fds[--count]);
	if (welcome->magic != ISWF_MAGIC || welcome->version != ISWF_VERSION)
		return -EPROTO;
	L->refused = welcome->refused != 0;
	return welcome->refused != 0                   ? welcome->refused
	       : (message.msg_flags & MSG_CTRUNC) != 0 ? -EMFILE
						       : -EPROTO;
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
	atomic_store_explicit(&told->pauses, count->pauses, memory_order_relaxed);
	atomic_store_explicit(&told->pause_ns, count->pause_ns, memory_order_relaxed);
	atomic_store_explicit(&L->ring->pages_away, iswf_agent.count.pages_away,
			      memory_order_relaxed);
	iswf_agent.others = atomic_load_explicit(&L->ring->others, memory_order_relaxed);
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

/* Maps the new ring where the old one was. */
static int map_ring(int fd)
{
	int flags = L->memory != NULL ? MAP_SHARED | MAP_FIXED : MAP_SHARED;

	L->memory =
		iswf_real()->mmap(L->memory, ISWF_RING_BYTES, PROT_READ | PROT_WRITE, flags, fd, 0);
	if (L->memory == MAP_FAILED) {
		L->memory = NULL;
		return -ENOMEM;
	}
	(void)iswf_real()->madvise(L->memory, ISWF_RING_BYTES, MADV_DONTFORK);
	return 0;
}

static void use_ring(const struct iswf_welcome *welcome, const int fds[3])
{
	L->ring_fd = iswf_own_fd(fds[0]);
	pthread_mutex_lock(&L->lock);
	L->bell[ISWF_KIND_READ] = iswf_own_fd(fds[1]);
	L->bell[ISWF_KIND_WRITE] = iswf_own_fd(fds[2]);
	L->ring = L->memory;
	tell();
	L->client = welcome->client;
	L->blocks = welcome->blocks_max;
	memcpy(L->token, welcome->token, sizeof(L->token));
	L->epoch++;
	memset(L->used, 0, sizeof(L->used));
	pthread_cond_broadcast(&L->slot_free);
	pthread_mutex_unlock(&L->lock);
}

static void close_sock(void)
{
	iswf_close_own(L->sock);
	L->sock = -1;
}

/*
 * What is missing here, descriptors or addresses, is waited for by a process that comes back: it
 * has blocks there, and its pair stays.
 */
static int take_welcome(uint64_t until_ns)
{
	struct iswf_welcome welcome;
	int fds[3], code = wait_for_welcome(until_ns);

	if (code != 0)
		return code;
	while ((code = hear_welcome(&welcome, fds)) == -EMFILE && until_ns == 0)
		pause_ns(TICK_NS);
	if (code != 0)
		return code;
	while ((code = map_ring(fds[0])) != 0 && until_ns == 0)
		pause_ns(TICK_NS);
	if (code == 0)
		use_ring(&welcome, fds);
	for (uint32_t i = 0; code != 0 && i < 3; i++)
		iswf_real()->close(fds[i]);
	return code;
}

static int connect_once(uint64_t until_ns)
{
	int pair[2], fds[2], code;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
		return -errno;
	L->sock = iswf_own_fd(pair[0]);
	fds[0] = pair[1];
	fds[1] = L->uffd;
	code = send_hello(L->job, ISWF_OFF_NONE, fds, 2, until_ns);
	iswf_real()->close(pair[1]);
	if (code == 0)
		code = take_welcome(until_ns);
	if (code != 0)
		close_sock();
	return code;
}

int iswf_link_open(int job_fd, int uffd, uint32_t *blocks_out)
{
	int code;

	L->job = job_fd;
	L->uffd = uffd;
	code = connect_once(iswf_now_ns() + HELLO_MS_MAX * 1000000ull);
	*blocks_out = L->blocks;
	return code;
}

static void close_bells(void)
{
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++) {
		iswf_close_own(L->bell[kind]);
		L->bell[kind] = -1;
	}
	iswf_close_own(L->ring_fd);
	L->ring_fd = -1;
}

void iswf_link_close(void)
{
	close_sock();
	close_bells();
	if (L->memory != NULL)
		iswf_real()->munmap(L->memory, ISWF_RING_BYTES);
	L->memory = L->ring = NULL;
}

/* Nobody asks in the old ring from now on; whoever waits there is woken until it has left. */
static void lose_ring(void)
{
	struct iswf_ring *ring;

	pthread_mutex_lock(&L->lock);
	ring = L->ring;
	L->ring = NULL;
	L->epoch++;
	while (L->users > 0) {
		for (uint32_t i = 0; i < ISWF_SLOTS; i++)
			(void)iswf_real()->syscall(SYS_futex, &ring->slots[i].state, FUTEX_WAKE,
						   1 << 30, NULL, NULL, 0);
		pthread_mutex_unlock(&L->lock);
		pause_ns(WAKE_NS);
		pthread_mutex_lock(&L->lock);
	}
	pthread_mutex_unlock(&L->lock);
	close_bells();
}

/* A packet says nothing here, and an empty one is no end. */
static void wait_for_end(void)
{
	struct pollfd end = {.fd = L->sock};

	while (poll(&end, 1, -1) < 1 || (end.revents & (POLLHUP | POLLERR | POLLNVAL)) == 0)
		;
	close_sock();
}

/* False: nobody has what is far. */
static bool come_back(void)
{
	for (;;) {
		int code = connect_once(0);

		if (code == 0)
			return true;
		if (code == -EINVAL || code == -EPROTO || code == -EBADF || is_deserted(L->job))
			return false;
		pause_ns(TICK_NS); /* -EPIPE: one more process died, before it answered */
	}
}

/* Nothing is far, nor will be. */
static bool has_ended(void)
{
	bool ended;

	pthread_mutex_lock(&iswf_agent.lock);
	ended = iswf_agent.ended;
	pthread_mutex_unlock(&iswf_agent.lock);
	return ended;
}

void *iswf_link_main(void *arg)
{
	(void)arg;
	do {
		wait_for_end();
		lose_ring();
	} while (!has_ended() && come_back());
	pthread_mutex_lock(&iswf_agent.lock);
	iswf_agent.resting = true;
	pthread_mutex_unlock(&iswf_agent.lock);
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
