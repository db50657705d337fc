/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hellos of processes, and what clients gave: the thread that hears the ones closes the others.
 * To close a foreign descriptor may wait (a file of FUSE, a socket that lingers, what lies unread
 * in a socket), and so may a look at a client's memory, or giving back what it has mapped. So this
 * thread may wait, and holds no lock meanwhile: hellos of others wait with it, requests and ends of
 * processes do not.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "frontend/far_client.h"

#ifndef SCM_PIDFD /* Linux 6.5 */
#define SCM_PIDFD 0x04
#endif
#define PASSED_MAX  253u /* descriptors in a message, by Linux */
#define WANTED      2u   /* of a hello: socket, userfaultfd */
#define PROBE_START (16ull << 20)

struct newcomer {
	struct iswf_hello hello;
	const struct far_job *job;
	int fd[PASSED_MAX]; /* -1: somebody else's now */
	uint32_t fds;
	pid_t pid; /* who sent it, as the kernel says */
	int pidfd;
};

/* ----------------------------------------------------------------------- memory */

static bool is_userfaultfd(int fd)
{
	char path[32], target[64];
	ssize_t length;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	length = readlink(path, target, sizeof(target) - 1);
	if (length <= 0)
		return false;
	target[length] = '\0';
	return strcmp(target, "anon_inode:[userfaultfd]") == 0;
}

/*
 * Whether the memory behind a userfaultfd is still there. A request that does nothing, as it names
 * a range that is not registered for it, is ESRCH where it is not, and EINVAL where nothing was
 * ever registered.
 */
static bool memory_lives(int uffd)
{
	struct uffdio_writeprotect probe = {
		.range = {.start = PROBE_START, .len = ISWF_PAGE_BYTES},
	};

	if (uffd < 0 || ioctl(uffd, UFFDIO_WRITEPROTECT, &probe) == 0)
		return uffd >= 0;
	return errno != ESRCH && errno != EINVAL;
}

/* ------------------------------------------------------------------------ hello */

static void take_part(struct newcomer *newcomer, const struct cmsghdr *part)
{
	struct ucred sender;

	if (part->cmsg_level != SOL_SOCKET)
		return;
	if (part->cmsg_type == SCM_RIGHTS) {
		size_t bytes = ISWI_MIN(part->cmsg_len - CMSG_LEN(0), sizeof(newcomer->fd));

		memcpy(newcomer->fd, CMSG_DATA(part), bytes);
		newcomer->fds = (uint32_t)(bytes / sizeof(int));
	} else if (part->cmsg_type == SCM_CREDENTIALS) {
		memcpy(&sender, CMSG_DATA(part), sizeof(sender));
		newcomer->pid = sender.pid;
	} else if (part->cmsg_type == SCM_PIDFD) {
		memcpy(&newcomer->pidfd, CMSG_DATA(part), sizeof(int));
	}
}

/* Whether nobody can say hello there from now on: an empty message looks like that, too. */
static bool has_ended(int job)
{
	struct pollfd state = {.fd = job, .events = POLLRDHUP};

	return poll(&state, 1, 0) == 1;
}

/* Next hello on a job's socket: 1, 0 when there is none, -EPIPE when there never will be. */
static int hear(struct newcomer *newcomer)
{
	union {
		char bytes[CMSG_SPACE(PASSED_MAX * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred)) +
			   CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec data = {&newcomer->hello, sizeof(newcomer->hello)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	ssize_t got = recvmsg(newcomer->job->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (got < 0)
		return errno != EAGAIN && has_ended(newcomer->job->fd) ? -EPIPE : 0;
	for (struct cmsghdr *part = CMSG_FIRSTHDR(&message); part != NULL;
	     part = CMSG_NXTHDR(&message, part))
		take_part(newcomer, part);
	if (got == 0 && newcomer->fds == 0)
		return has_ended(newcomer->job->fd) ? -EPIPE : 0;
	if (got != (ssize_t)sizeof(newcomer->hello) || message.msg_flags & MSG_TRUNC)
		newcomer->hello.magic = 0;
	return 1;
}

static void refuse(int sock, int code)
{
	const struct iswf_welcome welcome = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION,
		.refused = code,
	};

	(void)send(sock, &welcome, sizeof(welcome), MSG_DONTWAIT | MSG_NOSIGNAL);
}

static int welcome(const struct far_client *client, int sock, int ring_fd)
{
	const struct iswi_far_table *table = &client->far->table;
	struct iswf_welcome text = {
		.magic = ISWF_MAGIC,
		.version = ISWF_VERSION,
		.client = client->index + 1,
		.blocks_max = table->layout.numbers,
	};
	int fds[] = {ring_fd, client->bell[ISWF_KIND_READ], client->bell[ISWF_KIND_WRITE]};
	union {
		char bytes[CMSG_SPACE(sizeof(fds))];
		struct cmsghdr align;
	} control = {.bytes = {0}};
	struct iovec data = {&text, sizeof(text)};
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct cmsghdr *part = CMSG_FIRSTHDR(&message);

	memcpy(text.token, table->kept->clients[client->index].token, sizeof(text.token));
	part->cmsg_level = SOL_SOCKET;
	part->cmsg_type = SCM_RIGHTS;
	part->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(part), fds, sizeof(fds));
	return sendmsg(sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* -------------------------------------------------------------------- admission */

static bool same_token(const uint8_t *a, const uint8_t *b)
{
	uint8_t differ = 0;

	for (uint32_t i = 0; i < ISWF_TOKEN_BYTES; i++)
		differ |= a[i] ^ b[i];
	return differ == 0;
}

/* Under the lock. */
static bool has_client(const struct far *far, uint64_t job)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		if (far->clients[i].phase != ISWI_FAR_UNUSED &&
		    far->table.kept->clients[i].job == job)
			return true;
	return false;
}

/* Under the lock. For each job that has no client yet a place is left. */
static struct far_client *find_unused(struct far *far, const struct far_job *job)
{
	struct far_client *found = NULL;
	uint32_t unused = 0, others = 0;

	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		if (far->clients[i].phase != ISWI_FAR_UNUSED)
			continue;
		found = unused++ == 0 ? &far->clients[i] : found;
	}
	for (uint32_t i = 0; i < ISWI_FAR_JOBS_MAX; i++)
		others += &far->jobs[i] != job && far->jobs[i].fd >= 0 &&
			  !has_client(far, far->jobs[i].id);
	return unused > others ? found : NULL;
}

/* Under the lock. Its process has executed another program, or never heard the welcome. */
static void end_former(struct far *far, pid_t pid)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		if (far->clients[i].phase != ISWI_FAR_UNUSED &&
		    far->table.kept->clients[i].pid == pid)
			iswi_far_begin_end(&far->clients[i], false);
}

/* Under the lock. The client that it was; NULL with *code_out. */
static struct far_client *find_former(struct far *far, const struct newcomer *newcomer,
				      int *code_out)
{
	const struct iswf_hello *hello = &newcomer->hello;
	const struct iswi_far_kept_client *kept;
	struct far_client *client;

	*code_out = -EINVAL;
	if (hello->client > ISWI_FAR_CLIENTS_MAX)
		return NULL;
	client = &far->clients[hello->client - 1];
	kept = &far->table.kept->clients[client->index];
	if (client->phase == ISWI_FAR_UNUSED || kept->pid != newcomer->pid ||
	    !same_token(hello->token, kept->token))
		return NULL;
	if (client->phase == ISWI_FAR_DISCARDING || client->phase == ISWI_FAR_CLOSING)
		return NULL;
	/* The end of its socket has not been seen here yet. */
	*code_out = -EAGAIN;
	return client->phase == ISWI_FAR_AWAITED ? client : NULL;
}

/* Its place among the clients, which is this thread's from now on. NULL with *code_out. */
static struct far_client *claim(struct far *far, const struct newcomer *newcomer, int *code_out)
{
	struct far_client *client;

	pthread_mutex_lock(&far->lock);
	if (newcomer->hello.client != 0) {
		client = find_former(far, newcomer, code_out);
	} else {
		end_former(far, newcomer->pid);
		client = find_unused(far, newcomer->job);
		*code_out = -ENOSPC;
	}
	if (client != NULL) {
		client->phase = ISWI_FAR_BEGINNING;
		client->generation = (client->generation + 1) % ISWI_FAR_GENERATIONS;
	}
	pthread_mutex_unlock(&far->lock);
	return client;
}

/* ------------------------------------------------------------------------ begin */

/* The order of far_table.h: `used` last. */
static int keep_client(struct far_client *client, const struct newcomer *newcomer)
{
	struct iswi_far_kept_client *kept = &client->far->table.kept->clients[client->index];

	if (getrandom(kept->token, sizeof(kept->token), 0) != (ssize_t)sizeof(kept->token))
		return -EIO;
	kept->pid = newcomer->pid;
	kept->started = iswi_far_started(newcomer->pid);
	kept->job = newcomer->job->id;
	atomic_store(&kept->used, 1);
	return 0;
}

static void swap(int *a, int *b)
{
	int was = *a;

	*a = *b;
	*b = was;
}

/*
 * Watches of a process are for one event: what comes while its client is nobody's to end comes
 * again at the next watch.
 */
static int watch_process(struct far_client *client, int op)
{
	return iswi_far_watch(client->far->control_epoll, op, client->pidfd, EPOLLIN | EPOLLONESHOT,
			      iswi_far_about(ISWI_FAR_ABOUT_PROCESS, client));
}

/* What the newcomer gave is the client's; what the client had of it is the newcomer's to close. */
static int go_live(struct far_client *client, struct newcomer *newcomer)
{
	struct far *far = client->far;
	bool is_new = newcomer->hello.client == 0;
	int code;

	pthread_mutex_lock(&far->lock);
	if (is_new)
		swap(&client->pidfd, &newcomer->pidfd);
	swap(&client->sock, &newcomer->fd[0]);
	swap(&client->uffd, &newcomer->fd[1]);
	code = iswi_far_watch(far->control_epoll, EPOLL_CTL_ADD, client->sock, EPOLLIN,
			      iswi_far_about(ISWI_FAR_ABOUT_SOCK, client));
	if (code == 0)
		code = watch_process(client, is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD);
	if (code == 0) {
		client->phase = ISWI_FAR_LIVE;
		iswi_far_set_live(client, true);
	} else {
		(void)epoll_ctl(far->control_epoll, EPOLL_CTL_DEL, client->sock, NULL);
		swap(&client->sock, &newcomer->fd[0]);
		swap(&client->uffd, &newcomer->fd[1]);
		if (is_new)
			swap(&client->pidfd, &newcomer->pidfd);
	}
	pthread_mutex_unlock(&far->lock);
	/* It may have asked since its welcome. */
	for (uint32_t kind = 0; kind < ISWF_KINDS; kind++)
		iswi_far_tell(far->look_told[kind]);
	return code;
}

/* Back to what it was. */
static void undo(struct far_client *client, bool is_new)
{
	struct far *far = client->far;

	iswi_far_drop_ring(client);
	pthread_mutex_lock(&far->lock);
	if (is_new)
		atomic_store(&far->table.kept->clients[client->index].used, 0);
	else
		(void)watch_process(client, EPOLL_CTL_MOD);
	client->phase = is_new ? ISWI_FAR_UNUSED : ISWI_FAR_AWAITED;
	pthread_mutex_unlock(&far->lock);
}

static int begin(struct far_client *client, struct newcomer *newcomer)
{
	bool is_new = newcomer->hello.client == 0;
	int code = is_new ? keep_client(client, newcomer) : 0, ring_fd = -1;

	if (code == 0)
		ring_fd = iswi_far_make_link(client);
	if (code == 0 && ring_fd < 0)
		code = ring_fd;
	if (code == 0)
		code = welcome(client, newcomer->fd[0], ring_fd);
	if (ring_fd >= 0)
		close(ring_fd);
	if (code == 0)
		code = go_live(client, newcomer);
	if (code != 0)
		undo(client, is_new);
	return code;
}

static int admit(struct far *far, struct newcomer *newcomer)
{
	const struct iswf_hello *hello = &newcomer->hello;
	struct far_client *client;
	int code = 0;

	if (hello->magic != ISWF_MAGIC || hello->version != ISWF_VERSION)
		return -EPROTO;
	if (newcomer->fds != WANTED || !is_userfaultfd(newcomer->fd[1]))
		return -EBADF;
	if (newcomer->pid <= 0 || newcomer->pidfd < 0)
		return -ESRCH; /* it is not in sight of this process */
	client = claim(far, newcomer, &code);
	return client == NULL ? code : begin(client, newcomer);
}

/* A process that has no agent says why, and wants no answer. */
static void count_off(struct far *far, uint32_t off)
{
	pthread_mutex_lock(&far->lock);
	iswi_far_count_off(far, off);
	pthread_mutex_unlock(&far->lock);
}

static void end_job(struct far *far, struct far_job *job)
{
	/* First of all: the holder's copy of the open file keeps it watched. */
	(void)epoll_ctl(far->hello_epoll, EPOLL_CTL_DEL, job->fd, NULL);
	close(job->fd);
	pthread_mutex_lock(&far->lock);
	job->fd = -1;
	pthread_mutex_unlock(&far->lock);
}

/* One hello, then others have their turn. */
static void greet(struct far *far, struct far_job *job)
{
	struct newcomer newcomer = {.job = job, .pidfd = -1};
	int code = hear(&newcomer);

	if (code == -EPIPE)
		end_job(far, job);
	if (code == 1 && newcomer.hello.magic == ISWF_MAGIC && newcomer.hello.off != 0) {
		count_off(far, newcomer.hello.off);
	} else if (code == 1) {
		code = admit(far, &newcomer);
		if (code != 0 && newcomer.fds > 0)
			refuse(newcomer.fd[0], code);
	}
	for (uint32_t i = 0; i < newcomer.fds; i++)
		iswi_far_close(&newcomer.fd[i]);
	iswi_far_close(&newcomer.pidfd);
}

/* ----------------------------------------------------------------------- leaving */

static void look_at_left(struct far_client *client)
{
	struct far *far = client->far;
	bool lives = memory_lives(client->uffd);

	iswi_far_drop_ring(client);
	iswi_far_close(&client->sock);
	pthread_mutex_lock(&far->lock);
	if (lives) {
		client->phase = ISWI_FAR_AWAITED;
		(void)watch_process(client, EPOLL_CTL_MOD);
	} else {
		iswi_far_begin_discard(client);
	}
	pthread_mutex_unlock(&far->lock);
}

static void close_given(struct far_client *client)
{
	struct far *far = client->far;

	iswi_far_drop_ring(client);
	iswi_far_close(&client->sock);
	iswi_far_close(&client->pidfd);
	iswi_far_close(&client->uffd);
	pthread_mutex_lock(&far->lock);
	client->phase = ISWI_FAR_UNUSED;
	pthread_mutex_unlock(&far->lock);
}

static void tend(struct far_client *client)
{
	enum iswi_far_phase phase;

	pthread_mutex_lock(&client->far->lock);
	if (client->phase == ISWI_FAR_LEFT)
		client->phase = ISWI_FAR_LEAVING;
	phase = client->phase;
	pthread_mutex_unlock(&client->far->lock);
	if (phase == ISWI_FAR_LEAVING)
		look_at_left(client);
	else if (phase == ISWI_FAR_CLOSING)
		close_given(client);
}

void *iswi_far_hello_main(void *arg)
{
	struct far *far = arg;

	while (!atomic_load(&far->stopping)) {
		struct epoll_event event;
		enum iswi_far_about about;

		if (epoll_wait(far->hello_epoll, &event, 1, -1) != 1)
			continue;
		about = (enum iswi_far_about)(event.data.u64 >> 56);
		if (about == ISWI_FAR_ABOUT_JOB)
			greet(far, &far->jobs[(uint32_t)event.data.u64]);
		if (about != ISWI_FAR_ABOUT_TOLD)
			continue;
		iswi_far_hear(far->hello_told);
		for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
			tend(&far->clients[i]);
	}
	return NULL;
}
