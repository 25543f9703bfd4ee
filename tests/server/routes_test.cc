// The routes and their description, docs/openapi.yaml.
#include "server/routes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "server/embedded.h"

namespace anchorkv::server {
namespace {

std::vector<Route> AllRoutes() {
  httplib::Server server;
  return AddRoutes(&server, nullptr, std::chrono::seconds(1));
}

// "GET /path" for every operation of the file, by its indentation: a path, then its methods. "*name" repeats "&name".
std::set<std::string> Described() {
  std::istringstream file{std::string(OpenApiFile())};
  std::set<std::string> found;
  std::map<std::string, std::set<std::string>> anchors;  // methods
  std::string line, path, anchor;
  bool inside = false;
  while (std::getline(file, line)) {
    if (!line.empty() && line[0] != ' ') inside = line == "paths:";
    if (!inside) continue;
    if (line.rfind("  /", 0) == 0) {
      const size_t colon = line.find(':');
      path = line.substr(2, colon - 2);
      std::replace(path.begin(), path.end(), '{', ':');
      std::erase(path, '}');
      const std::string rest = line.size() > colon + 2 ? line.substr(colon + 2) : "";
      anchor = rest.rfind('&', 0) == 0 ? rest.substr(1) : "";
      if (rest.rfind('*', 0) == 0) {
        for (const std::string& method : anchors.at(rest.substr(1))) found.insert(method + " " + path);
      }
    }
    for (const char* method : {"GET", "POST", "DELETE", "PUT", "PATCH"}) {
      std::string word = method;
      std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::tolower(c); });
      if (line != "    " + word + ":") continue;
      found.insert(std::string(method) + " " + path);
      if (!anchor.empty()) anchors[anchor].insert(method);
    }
  }
  return found;
}

TEST(Routes, EveryRouteIsDescribedAndEveryDescriptionIsARoute) {
  std::set<std::string> served;
  for (const Route& route : AllRoutes()) {
    if (route.served) served.insert(route.method + " " + route.path);
  }
  EXPECT_EQ(served, Described());
  EXPECT_GT(served.size(), 15u);
}

TEST(Routes, MethodsOfAPath) {
  const std::vector<Route> routes = AllRoutes();
  EXPECT_EQ(AllowedMethods(routes, "/v1/contexts"), "POST, GET, HEAD");
  EXPECT_EQ(AllowedMethods(routes, "/v1/contexts/"), "");
  EXPECT_EQ(AllowedMethods(routes, "/v1/contexts/x"), "GET, HEAD, DELETE");
  EXPECT_EQ(AllowedMethods(routes, "/v1/contexts/x/file"), "GET, HEAD");
  EXPECT_EQ(AllowedMethods(routes, "/v1/contexts/x/other"), "");
  EXPECT_EQ(AllowedMethods(routes, "/v1/contexts//file"), "");
  EXPECT_EQ(AllowedMethods(routes, "/"), "GET, HEAD");
  EXPECT_EQ(AllowedMethods(routes, "/completion"), "GET, HEAD, POST");
  for (const char* path : {"", "v1", "//", "/nowhere", "/v1", "/v1/contexts/x/file/y"}) {
    EXPECT_EQ(AllowedMethods(routes, path), "") << path;
  }
}

}  // namespace
}  // namespace anchorkv::server
