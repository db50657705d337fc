// SPDX-License-Identifier: Apache-2.0
/* Real data to and from a server that is not ours: nbdkit's memory plugin. */
#define _GNU_SOURCE 1
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "tcp_fixture.h"

#define OPS      64
#define OP_BYTES (256u << 10)

extern char **environ;

/* nbdkit takes a listening socket by systemd's protocol, so that no port has to be guessed. */
static pid_t nbdkit_start(int listen_fd)
{
	/* LISTEN_PID must be nbdkit's own: the shell sets it and becomes nbdkit. */
	char script[] = "LISTEN_PID=$$ LISTEN_FDS=1 exec nbdkit --exit-with-parent -f memory 16M";
	char *argv[] = {"sh", "-c", script, NULL};
	posix_spawn_file_actions_t actions;
	pid_t pid;

	CHECK_EQ(posix_spawn_file_actions_init(&actions), 0);
	/* Number 3 is where that protocol wants it; dup2 onto itself clears close-on-exec. */
	CHECK_EQ(posix_spawn_file_actions_adddup2(&actions, listen_fd, 3), 0);
	CHECK_EQ(posix_spawnp(&pid, "sh", &actions, NULL, argv, environ), 0);
	posix_spawn_file_actions_destroy(&actions);
	return pid;
}

static void fill(uint8_t *data, uint32_t bytes, uint32_t seed)
{
	for (uint32_t i = 0; i < bytes; i++) {
		seed = seed * 1664525 + 1013904223;
		data[i] = (uint8_t)(seed >> 24);
	}
}

static void round_trip(const struct iswi_tcp_config *config)
{
	static uint8_t sent[OPS][OP_BYTES], got[OPS][OP_BYTES];
	struct op op[OPS];
	struct client client;

	client_connect(&client, config);
	for (uint32_t i = 0; i < OPS; i++) {
		fill(sent[i], OP_BYTES, i);
		op_start(&op[i], &client, ISWI_XFER_WRITE, (uint64_t)i * OP_BYTES, sent[i],
			 OP_BYTES);
	}
	ops_await(op, OPS, 0);
	for (uint32_t i = 0; i < OPS; i++)
		op_start(&op[i], &client, ISWI_XFER_READ, (uint64_t)i * OP_BYTES, got[i], OP_BYTES);
	ops_await(op, OPS, 0);
	CHECK(memcmp(sent, got, sizeof(sent)) == 0);
	CHECK_EQ(client.downs, 0);
	client_destroy(&client);
}

int main(void)
{
	struct server server;
	struct iswi_tcp_config config;
	pid_t pid;

	if (system("command -v nbdkit >/dev/null && nbdkit memory --version >/dev/null") != 0)
		SKIP("nbdkit is not installed");
	server_listen(&server, AF_INET);
	config = client_config(server.port);
	pid = nbdkit_start(server.listen_fd);
	close(server.listen_fd);
	round_trip(&config);
	config.depth = 1;
	round_trip(&config);
	CHECK_EQ(kill(pid, SIGKILL), 0);
	CHECK_EQ(waitpid(pid, NULL, 0), pid);
	return 0;
}
